"""Calls that a grammar forces: a list of them, or the arguments of the one that was named. No format of any model."""

from __future__ import annotations

from services.gateway.tools.call import Call, CallReader, Schemas, Taken, call_of, parsed, to_json


class ForcedCalls(CallReader):
    """[{"name": "f", "arguments": {...}}, ...]: each call as soon as it is complete."""

    begins = ("{",)
    closers = (",",)

    def feed(self, text: str) -> list[str | Call]:
        return _calls(super().feed(text))

    def finish(self) -> list[str | Call]:
        return _calls(super().finish())

    def _take(self, text: str) -> Taken | None:
        end = self._brackets.end(text, 0)
        call = None if end is None else call_of(parsed(text[:end]))
        return None if end is None else Taken(end, [call] if call else ())


class NamedCall(CallReader):
    """{...}: the arguments, and nothing else."""

    begins = ("{",)

    def __init__(self, schemas: Schemas) -> None:
        super().__init__(schemas)
        (self._name,) = schemas

    def _take(self, text: str) -> Taken | None:
        end = self._brackets.end(text, 0)
        arguments = None if end is None else parsed(text[:end])
        if end is None:
            return None
        return Taken(end, [Call(self._name, to_json(arguments))] if isinstance(arguments, dict) else ())


def _calls(pieces: list[str | Call]) -> list[str | Call]:
    """Without the brackets of the list."""
    return [piece for piece in pieces if isinstance(piece, Call)]
