"""Calls that a grammar forces: a list of calls, or the arguments of the named tool. In no model's own format."""

from __future__ import annotations

from collections.abc import Sequence

from services.gateway.tools.call import Call, CallReader, CompleteCall, Piece, Schemas, json_text
from services.gateway.tools.formats.json_call import JsonCalls

LIST = "[, \t\r\n]"


class ForcedCalls(JsonCalls):
    """Reads [{"name": "f", "arguments": {...}}, ...]: returns each call once it is complete."""

    begins = ("{",)
    closers = (",",)

    def __init__(self, schemas: Schemas) -> None:
        super().__init__(schemas)
        self._between = True  # only the list's own marks since the last call

    def feed(self, text: str) -> list[Piece]:
        return self._unlisted(super().feed(text))

    def finish(self, cut: bool = False) -> list[Piece]:
        return self._unlisted(super().finish(cut))

    def _unlisted(self, pieces: list[Piece]) -> list[Piece]:
        """Returns pieces without the list's marks."""
        found: list[Piece] = []
        for piece in pieces:
            if isinstance(piece, str) and self._between:
                piece = piece.lstrip(LIST)
            self._between = not isinstance(piece, str) or (self._between and not piece)
            if piece:
                found.append(piece)
        return found

    def _object(self, text: str) -> int | None:
        return 0


class NamedCall(CallReader):
    """Reads {...}: the arguments alone."""

    begins = ("{",)

    def __init__(self, schemas: Schemas) -> None:
        super().__init__(schemas)
        (self._name,) = schemas

    def _take(self, text: str) -> CompleteCall | None:
        end = self._brackets.end(text, 0)
        if end is None:
            return None
        return CompleteCall(end, self._sketch(text[:end]))

    def _sketch(self, text: str) -> Sequence[Call]:
        return [Call(self._name, json_text(text))]
