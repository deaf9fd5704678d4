"""Calls as JSON objects in a list behind a mark, each of them a call as soon as it is complete."""

from __future__ import annotations

import re
from typing import Any, ClassVar

from services.gateway.tools.call import CompleteCall, Schemas
from services.gateway.tools.formats.json_call import JsonCalls

S = r"\s{0,64}"  # so much white space, and no more: it is looked at again with each piece of text


class ListedCalls(JsonCalls):
    bare: ClassVar[bool] = False  # one object may stand without its list
    _entry: ClassVar[re.Pattern[str]]  # what comes before an object
    _may_be_entry: ClassVar[re.Pattern[str]]

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        marks = "|".join(map(re.escape, cls.begins))
        cls._entry = re.compile(rf"(?:(?:{marks}){S}\[{'?' if cls.bare else ''}|,){S}(?=\{{)")
        cls._may_be_entry = re.compile(rf"(?:(?:{marks}){S}\[?|,){S}")

    def __init__(self, schemas: Schemas) -> None:
        super().__init__(schemas)
        self._listed = False  # behind a call of a list

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
        """Behind a call of a list: its end, or the next one."""
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
