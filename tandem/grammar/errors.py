"""Errors of grammars: what is wrong, and where."""

from __future__ import annotations


class InvalidGrammar(ValueError):
    """No answer can be held to this; the text says why, `place` where in what the client gave, as a path."""

    def __init__(self, problem: str, place: str = "") -> None:
        super().__init__(problem, place)
        self.problem, self.place = problem, place

    def __str__(self) -> str:
        return self.problem
