"""The settings of speculative decoding, by which deployments and requests ask for it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Self

MAX_NUM_TOKENS = 16
HEADS = ("medusa", "eagle", "eagle3")  # heads are trained for one model
METHODS = ("none", "ngram", "draft", *HEADS)


@dataclass(frozen=True)
class Speculative:
    """The `method` that proposes tokens ahead, at most `num_tokens` in a step; `method` none: off."""

    method: str = "none"
    num_tokens: int = 8

    @classmethod
    def from_proto(cls, message: Any) -> Self:
        """Reads a tandem.v1.Speculative, unchecked."""
        return cls(message.method, message.num_tokens if message.HasField("num_tokens") else cls.num_tokens)

    def check(self, methods: Collection[str] = METHODS) -> None:
        """Checks that a worker with these methods can serve it. Raises ValueError that names the wrong field."""
        if self.method not in methods:
            raise ValueError(f"speculative.method: {self.method!r} is not one of {', '.join(methods)}")
        if not 0 <= self.num_tokens <= MAX_NUM_TOKENS:
            raise ValueError(f"speculative.num_tokens: {self.num_tokens} is not between 0 and {MAX_NUM_TOKENS}")


OFF = Speculative()
