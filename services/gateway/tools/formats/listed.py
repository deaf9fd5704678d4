"""Calls as JSON objects in a list after a mark, each reported once it is complete."""

from __future__ import annotations

import re
from typing import Any, ClassVar

from services.gateway.tools.call import CompleteCall, Schemas
from services.gateway.tools.formats.json_call import JsonCalls

S = r"\s{0,64}"  # bounded, as it is matched again with each piece of text


class ListedCalls(JsonCalls):
    bare: ClassVar[bool] = False  # a single object may have no list
    _entry: ClassVar[re.Pattern[str]]  # matches what precedes an object
    _may_be_entry: ClassVar[re.Pattern[str]]

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        marks = "|".join(map(re.escape, cls.begins))
        cls._entry = re.compile(rf"(?:(?:{marks}){S}\[{'?' if cls.bare else ''}|,){S}(?=\{{)")
        cls._may_be_entry = re.compile(rf"(?:(?:{marks}){S}\[?|,){S}")

    def __init__(self, schemas: Schemas) -> None:
        super().__init__(schemas)
        self._listed = False  # after a call of a list

    def _object(self, text: str) -> int | None:
        entry = self._entry.match(text)
        return entry.end() if entry else None

    def _take(self, text: str) -> CompleteCall | None:
        if entry := self._entry.match(text):
            taken = super()._take(text)
            self._listed = bool(taken and taken.calls) and entry[0].rstrip().endswith(("[", ","))
            return taken
        return None if self._may_be_entry.fullmatch(text) else self._no_call(text)

    def _marked(self, text: str) -> bool:
        return super()._marked(text) or text.startswith(",")

    def _unfinished(self) -> str:
        return "" if self._held.strip() == "," else self._held

    def _close(self) -> bool:
        """Take what follows a call of a list: its end, or the next call."""
        if not self._listed:
            return super()._close()
        rest = self._held.lstrip()
        if not rest:
            return False
        self._listed = self._closing = False
        if rest.startswith("]"):
            self._held, self._closing = rest[1:], bool(self.closers)
        elif self._may_be_entry.match(rest):
            self._held = rest
            self._open()
        return True
