"""The error of grammars: what is wrong, and where."""

from __future__ import annotations


class InvalidGrammar(ValueError):
    """A grammar that cannot be enforced; the message says why, `place` where in the client's input, as a path."""

    def __init__(self, problem: str, place: str = "") -> None:
        super().__init__(problem, place)
        self.problem, self.place = problem, place

    def __str__(self) -> str:
        return self.problem
