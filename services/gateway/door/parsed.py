"""A request as an API hands it to the door: its body read and checked, and the frame that its answer gets."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from services.gateway.door.exchange import Exchange
from services.gateway.errors import GatewayError
from services.gateway.generation import Answer, Delta
from services.gateway.tools import Call, ReadingPlan
from services.gateway.workers import Tokens
from tandem.sampling import SamplingParams
from tandem.speculative import Speculative


@dataclass(frozen=True, slots=True)
class Terms:
    """The fields of a body that say who asks, of which model, and how soon and how the answer is to come."""

    model: str
    user: str = ""
    service_tier: str | None = None
    priority: int | None = None
    streamed: bool = False
    cache_salt: str = ""
    speculative: Speculative | None = None


# Refuses, before tokenizing its prompt, a request whose answer of at most so many tokens would come too late.
# Returns the tenant.
CheckTurn = Callable[[Terms, int | None], str]


class Framing(ABC):
    """An API's words for an answer: the events of its stream, or all of it. One object serves one answer."""

    def begin(self) -> bytes:
        """Returns the events of a stream before its answer has begun."""
        return b""

    async def prepare(self, delta: Delta) -> None:
        """Make what is too long for one turn of the loop, before `chunk` or `whole` uses it."""
        return

    @abstractmethod
    def shows(self, delta: Delta) -> bool:
        """True if a stream has events for this delta."""

    def ends_with(self, delta: Delta) -> bool:
        """True if this delta is the last of the whole answer."""
        return bool(delta.finish_reason)

    @abstractmethod
    def chunk(self, delta: Delta) -> bytes:
        """Returns the events of one delta."""

    def event(self, delta: Delta) -> bytes:
        """Returns the delta's `chunk`, or nothing where a stream does not show it."""
        return self.chunk(delta) if self.shows(delta) else b""

    async def last(self) -> bytes:
        """Returns the events after those of the last delta."""
        return b""

    @abstractmethod
    def failure(self, error: GatewayError) -> bytes:
        """Returns the events that end a stream whose answer failed."""

    def gathered(self, choices: Sequence[Sequence[Delta]]) -> Sequence[Delta]:
        """Returns all deltas of each choice in the form that `whole` takes."""
        return [joined(deltas) for deltas in choices]

    @abstractmethod
    async def whole(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        """Returns the body of an answer that is not streamed."""


class Unstreamed(Framing):
    """An API whose answers are never streamed."""

    def shows(self, delta: Delta) -> bool:
        return False

    def chunk(self, delta: Delta) -> bytes:
        return b""

    def failure(self, error: GatewayError) -> bytes:
        return b""

    def gathered(self, choices: Sequence[Sequence[Delta]]) -> Sequence[Delta]:
        return [deltas[-1] for deltas in choices]


@dataclass(slots=True, eq=False)
class ParsedBody:
    """A body that was read and checked, except for the length of its prompts."""

    terms: Terms
    given: Mapping[str, Any]
    sampling: SamplingParams
    prompts: Sequence[Sequence[int]]
    param: str  # the field that had the prompts
    operation: str
    frame: Callable[[ParsedBody, Answer, int], Framing]  # the int: creation time, Unix seconds
    n: int = 1  # choices of each prompt
    reading: ReadingPlan | None = None
    dimensions: int | None = None  # of an embedding
    detach: Callable[[Exchange, Framing, Answer], Awaitable[None]] | None = None  # responds before the answer ends

    def framing(self, answer: Answer, created: int) -> Framing:
        return self.frame(self, answer, created)


def joined(deltas: Sequence[Delta]) -> Delta:
    """Returns all deltas of one choice as one."""
    tokens = Tokens([], [])
    for delta in deltas:
        tokens.add(delta.tokens)
    offsets = [offset for delta in deltas for offset in delta.offsets]
    text = "".join(delta.text for delta in deltas)
    reasoning = "".join(delta.reasoning for delta in deltas)
    calls: list[Call] = [call for delta in deltas for call in delta.calls]
    return replace(
        deltas[-1], text=text, tokens=tokens, offsets=offsets, reasoning=reasoning, calls=calls, call_parts=()
    )
