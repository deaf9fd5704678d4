"""Calls that a grammar forces: a list of them, or the arguments of the one that was named. No format of any model."""

from __future__ import annotations

from collections.abc import Sequence

from services.gateway.tools.call import Call, CallReader, Piece, Schemas, Taken, json_text, parsed
from services.gateway.tools.json_call import JsonCalls


class ForcedCalls(JsonCalls):
    """[{"name": "f", "arguments": {...}}, ...]: each call as soon as it is complete."""

    begins = ("{",)
    closers = (",",)

    def feed(self, text: str) -> list[Piece]:
        return _calls(super().feed(text))

    def finish(self) -> list[Piece]:
        return _calls(super().finish())

    def _object(self, text: str) -> int | None:
        return 0


class NamedCall(CallReader):
    """{...}: the arguments, and nothing else."""

    begins = ("{",)

    def __init__(self, schemas: Schemas) -> None:
        super().__init__(schemas)
        (self._name,) = schemas

    def _take(self, text: str) -> Taken | None:
        end = self._brackets.end(text, 0)
        if end is None:
            return None
        return Taken(end, self._sketch(text[:end]) if isinstance(parsed(text[:end]), dict) else ())

    def _sketch(self, text: str) -> Sequence[Call]:
        return [Call(self._name, json_text(text))]


def _calls(pieces: list[Piece]) -> list[Piece]:
    """Without the brackets of the list."""
    return [piece for piece in pieces if not isinstance(piece, str)]
