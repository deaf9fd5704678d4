"""One choice of an answer: its state, and the way that its tokens take.

first and last token    Mailbox.get -> Attempt -> Pipeline -> Choice.read -> deltas, to their reader
other tokens            Mailbox.put -> Choice.take -> Choice.write: an event, without waking a task
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
    """One choice. Its answer owns it; its pipeline and attempts fill it in, one after another."""

    request: Generation
    index: int
    text: ChoiceText

    # set when it begins
    # What workers are sent: the prompt, and the tokens written so far.
    sequence: worker_pb2.SequenceSpec = field(init=False)
    work: Work = field(init=False)
    meter: Meter = field(init=False)
    parent: Span = field(init=False)  # parent of its spans
    first_by: float = field(init=False)  # TTFT target, on the event loop's clock

    # its tokens
    written: list[int] = field(default_factory=list)  # by all attempts
    finish_reason: llm_pb2.FinishReason = llm_pb2.FINISH_REASON_UNSPECIFIED  # as its worker reports it
    write: Callable[[Delta], bool] | None = None  # writes an event immediately; returns False if full

    # its way through the cluster
    path: llm_pb2.Path = field(default_factory=llm_pb2.Path)
    mailbox: Mailbox | None = None  # the last attempt's that had one
    holder: str = ""  # incarnation of a decode worker that holds its prompt's KV
    decode_incarnation: str = ""
    revision: str = ""  # revision of the weights that compute it
    num_cached_tokens: int = 0
    queued_s: float = 0.0
    lost: str = ""  # why the last attempt failed
    migrated: int = 0  # attempts before this one
    fallback: str = ""  # why the path is not the intended one: a Fallback, or WORKER_LOST

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
        """Returns the histogram of the times between its tokens, a count for each bucket."""
        return self.meter.gaps if hasattr(self, "meter") else [0] * NUM_GAPS

    @property
    def itl_s(self) -> float | None:
        """Returns the mean time between its tokens in seconds; None with fewer than two."""
        return self.meter.itl_s if hasattr(self, "meter") else None

    def read(self, new: Tokens) -> Delta:
        """Returns the delta of new tokens, and counts them."""
        delta = self.text.feed(new, self.finish_reason)
        self.meter.count(len(delta.tokens.ids))
        return delta

    def take(self, new: Tokens) -> bool:
        """Write tokens between the first and the last as they are delivered. Returns False if the writer is full."""
        assert self.write is not None
        self.written += new.ids
        self.work.new_tokens += len(new.ids)  # what Admission.wrote does after the first token
        return self.write(self.read(new))

    def succeed(self) -> None:
        """Count the choice as a success."""
        prompt = self.request.prompts[self.index // self.request.n]
        reason = REASONS.get(self.text.finish_reason, "abort")
        self.meter.success(reason, len(prompt), self.num_cached_tokens, self.queued_s)

    def end(self) -> None:
        """Stop counting, and drop the writer: it refers to the answer, a cycle that only the garbage collector would
        free.
        """
        self.write = None
        self.meter.close()
