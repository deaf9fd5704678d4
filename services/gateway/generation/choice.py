"""One choice of an answer: all that is known of it, and the way that its tokens take.

its first, its last   Mailbox.get -> Attempt -> Pipeline -> Choice.read -> deltas, to their reader
the others            Mailbox.put -> Choice.take -> Choice.write: an event, while nobody is woken
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from opentelemetry.trace import Span

from services.gateway.admission import Work
from services.gateway.generation.choice_text import ChoiceText, Delta
from services.gateway.generation.request import Generation
from services.gateway.telemetry import NUM_GAPS, Meter
from services.gateway.workers import Mailbox, Tokens
from tandem.v1 import llm_pb2, worker_pb2

REASONS = {
    llm_pb2.FINISH_REASON_STOP: "stop",
    llm_pb2.FINISH_REASON_LENGTH: "length",
    llm_pb2.FINISH_REASON_TOOL_CALLS: "tool_calls",
}


@dataclass(slots=True, eq=False)
class Choice:
    """Made and owned by its answer. Its pipeline and its attempts, one after another, fill it in."""

    request: Generation
    index: int
    text: ChoiceText

    # from when it begins
    sequence: worker_pb2.SequenceSpec = field(init=False)  # what workers get, and have answered so far
    work: Work = field(init=False)
    meter: Meter = field(init=False)
    parent: Span = field(init=False)  # of its spans
    first_by: float = field(init=False)  # when its first token should come, on the event loop's clock

    # of its tokens
    written: list[int] = field(default_factory=list)  # of all attempts
    finish_reason: llm_pb2.FinishReason = llm_pb2.FINISH_REASON_UNSPECIFIED  # as its worker gives it
    write: Callable[[Delta], bool] | None = None  # writes an event at once; False: there is no room for another

    # of its way through the cluster
    path: llm_pb2.Path = field(default_factory=llm_pb2.Path)
    mailbox: Mailbox | None = None  # of the last attempt that had one
    holder: str = ""  # the incarnation of a decode worker that has its prompt's KV
    decode_incarnation: str = ""
    revision: str = ""  # of the weights that compute it
    num_cached_tokens: int = 0
    queued_s: float = 0.0
    lost: str = ""  # why the last attempt came to nothing
    migrated: int = 0  # attempts before this one
    fallback: str = ""  # why the path is not what it should be: a Fallback, or WORKER_LOST

    @property
    def name(self) -> str:
        return f"{self.request.request_id}-{self.index}"

    @property
    def num_proposed_tokens(self) -> int:
        return self.mailbox.num_proposed_tokens if self.mailbox else 0

    @property
    def num_accepted_tokens(self) -> int:
        return self.mailbox.num_accepted_tokens if self.mailbox else 0

    @property
    def gaps(self) -> list[int]:
        """How many of the times between its tokens lie in each bucket of the histogram of them."""
        return self.meter.gaps if hasattr(self, "meter") else [0] * NUM_GAPS

    @property
    def itl_s(self) -> float | None:
        """Mean time between its tokens, if it has two."""
        return self.meter.itl_s if hasattr(self, "meter") else None

    def read(self, new: Tokens) -> Delta:
        """The text of new tokens, counted."""
        delta = self.text.feed(new, self.finish_reason)
        self.meter.count(len(delta.tokens.ids))
        return delta

    def take(self, new: Tokens) -> bool:
        """Write tokens between the first and the last as they are delivered. False: there is no room for more."""
        assert self.write is not None
        self.written += new.ids
        self.work.new_tokens += len(new.ids)  # as Admission.wrote, behind the first
        return self.write(self.read(new))

    def succeed(self) -> None:
        """It has ended well."""
        prompt = self.request.prompts[self.index // self.request.n]
        reason = REASONS.get(self.text.finish_reason, "abort")
        self.meter.success(reason, len(prompt), self.num_cached_tokens, self.queued_s)

    def end(self) -> None:
        """Stop counting, and let go of the writer, which knows the answer: garbage that only a search would find."""
        self.write = None
        self.meter.close()
