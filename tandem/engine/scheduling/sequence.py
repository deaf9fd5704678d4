"""A request inside the engine.

add ──> WAITING ──admit──> RUNNING ──stop, length, error, abort──> gone
           ^                 │ ^
           └────preempt──────┘ │ join            its KV is computed again, or lies in host memory meanwhile
reserve ──> RESERVED ──────────┘
"""

from __future__ import annotations

import enum
import struct
from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from tandem.block_hash import next_hash, root_hash
from tandem.containment import NOBODY
from tandem.engine.types import FinishReason, KVSink, Request, SampledToken
from tandem.sampling import SamplingParams
from tandem.speculative import OFF, Speculative

if TYPE_CHECKING:
    from tandem.engine.kv import KVLayout
    from tandem.engine.lora import Adapter
    from tandem.grammar import Guide

# A sequence that begins apart has begun at this many tokens: prefill's, and one of a step in which no other began.
BEGUN_TOKENS = 2
DRAW = struct.Struct("=dddqQ")  # `struct draw` of kernels/sampling.h


class BlockUser(Protocol):
    """A user of a sequence's blocks besides the sequence, while `reading`: a sink that copies them, or a step that may
    still write to them."""

    @property
    def reading(self) -> bool: ...


class Status(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    RESERVED = "reserved"


class Pooling(Protocol):
    """Makes one vector of a prompt's hidden states. `reads_all`: it needs the state of every prompt token."""

    reads_all: bool

    def vector(self) -> list[float]: ...


@dataclass(slots=True, eq=False, weakref_slot=True)
class Sequence:
    """A request's tokens, how many of them have KV, and the blocks that hold that KV.

    The first `num_prompt_tokens` came with the request. The answer begins at `answer_start`, which is below
    `num_prompt_tokens` if another engine has written the answer's first tokens.

    The scheduler owns `block_table` and `status`; the engine appends tokens. `key` orders sequences in every queue.
    `turn` orders the prefills of one priority. `waits_since`: the clock of step seconds (Pace.stepped_s) when the
    sequence began to wait.
    `slot` is its place in the crash page while it runs. A suspect computes alone until it has `alone_until` output
    tokens. While a sequence has fewer than `apart_until`, no other sequence that begins apart may begin.
    `num_reserved_blocks` stay with it even if fewer suffice for now. `swapped_blocks` hold the KV of a preempted one.
    `proposed` are the tokens that a step tries ahead; `chance` is the share of recent proposals that were right. The
    draft model has KV for the first `num_drafted_tokens` tokens. `prompt_logprobs` has the log-probabilities so far,
    of `num_prompt_logprobs` to report.
    """

    request_id: str
    key: tuple[int, int]
    sampling: SamplingParams
    token_ids: array[int]
    num_prompt_tokens: int
    hashes: BlockHashes
    num_prior_tokens: int = 0
    sink: KVSink | None = None
    num_pushed_blocks: int = 0
    prefill_only: bool = False
    itl_target_s: float = 0.0
    choice_id: str = ""
    alone_until: int = 0
    apart_until: int = 0
    slot: int = NOBODY
    status: Status = Status.WAITING
    turn: int | None = None
    waits_since: float = 0.0
    num_reserved_blocks: int = 0
    block_table: list[int] = field(default_factory=list)
    window_start: int = 0  # of the table, the part that layers with a window hold: see SequenceWindows
    window_end: int = 0
    swapped_blocks: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_registered_blocks: int = 0
    num_cached_tokens: int | None = None
    error: str | None = None
    speculative: Speculative = OFF
    proposed: array[int] = field(default_factory=lambda: array("q"))
    chance: float | None = None
    num_proposed_tokens: int = 0
    num_accepted_tokens: int = 0
    num_drafted_tokens: int = 0
    guide: Guide | None = None
    num_prompt_logprobs: int = 0
    prompt_logprobs: list[SampledToken] = field(default_factory=list)
    pool: Pooling | None = None
    adapter: Adapter | None = None
    under_way: BlockUser | None = None  # the last step launched with this sequence
    answer_start: int = field(init=False)
    draw: bytes = field(init=False)  # the sampling parameters of a draw, packed for the kernels
    adjusts: bool = field(init=False)  # True if logits are adjusted before every choice

    def __post_init__(self) -> None:
        self.answer_start = self.num_prompt_tokens - self.num_prior_tokens
        sampling = self.sampling
        top_k = min(sampling.top_k, 2**31)
        self.draw = DRAW.pack(sampling.temperature, sampling.top_p, sampling.min_p, top_k, sampling.seed % 2**64)
        penalties = (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty)
        lists = sampling.grammar, sampling.logit_bias, sampling.allowed_token_ids, sampling.bad_words_token_ids
        has_budget = sampling.thinking_token_budget is not None
        self.adjusts = penalties != (1.0, 0.0, 0.0) or any(lists) or has_budget

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """The number of answer tokens so far, including those that another engine wrote."""
        return len(self.token_ids) - self.answer_start

    @property
    def is_prefilling(self) -> bool:
        """True until this engine has sampled a token of the sequence."""
        return len(self.token_ids) == self.num_prompt_tokens

    @property
    def priority(self) -> int:
        return self.key[0]

    @property
    def was_preempted(self) -> bool:
        """True while the sequence waits to resume after a preemption."""
        return self.status is Status.WAITING and not self.is_prefilling

    @property
    def reads_whole_prompt(self) -> bool:
        """True if cached blocks do not help, because logits or hidden states of every prompt token are wanted."""
        wants_states = self.pool is not None and self.pool.reads_all and self.is_prefilling
        return len(self.prompt_logprobs) < self.num_prompt_logprobs or wants_states

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def ahead(self) -> array[int]:
        return array("q")

    @property
    def reader(self) -> BlockUser | None:
        """The sink or step that still uses the sequence's blocks, if any does."""
        return next((one for one in (self.sink, self.under_way) if one is not None and one.reading), None)

    @property
    def overlaps(self) -> bool:
        """True if the sequence's next step needs only the drawn token of this step, which the device has."""
        logits = self.takes_logits_as_they_are and self.sampling.logprobs is None
        return logits and not self.is_prefilling and self.sink is None and self.speculative.method == "none"

    @property
    def takes_logits_as_they_are(self) -> bool:
        return not self.adjusts and len(self.token_ids) - self.answer_start >= self.sampling.min_tokens

    def tokens_between(self, start: int, end: int) -> array[int]:
        """Returns tokens `start` … `end`; positions after the known tokens take proposed ones."""
        known = len(self.token_ids)
        if end <= known:
            return self.token_ids[start:end]
        return self.token_ids[start:] + self.proposed[max(0, start - known) : end - known]

    def num_tokens_to_come(self, max_model_len: int) -> int:
        return min(self.sampling.max_tokens - self.num_output_tokens, max_model_len - self.num_tokens)

    def check_stop(self, max_model_len: int) -> FinishReason | None:
        """Returns STOP or LENGTH if the last token ends the sequence, else None. The sampler draws no stop token before
        min_tokens."""
        sampling, num_tokens = self.sampling, len(self.token_ids)
        if self.token_ids[-1] in sampling.stop_token_ids:
            return FinishReason.STOP
        if num_tokens - self.answer_start >= sampling.max_tokens or num_tokens >= max_model_len:
            return FinishReason.LENGTH
        return None


class Row(Protocol):
    """A sequence as the sampler sees it, for one row of logits. The sampler sets `error` if it cannot draw a token."""

    error: str | None

    @property
    def sampling(self) -> SamplingParams: ...
    @property
    def draw(self) -> bytes: ...
    @property
    def token_ids(self) -> array[int]: ...
    @property
    def answer_start(self) -> int: ...
    @property
    def num_output_tokens(self) -> int: ...
    @property
    def guide(self) -> Guide | None: ...
    @property
    def ahead(self) -> array[int]:
        """The last tokens of `token_ids`, which are only proposed."""

    @property
    def takes_logits_as_they_are(self) -> bool: ...


@dataclass(slots=True, eq=False)
class Ahead:
    """A `Row` that shows a sequence as it will be if its first `count` proposed tokens are accepted."""

    seq: Sequence
    count: int
    error: str | None = None

    @property
    def sampling(self) -> SamplingParams:
        return self.seq.sampling

    @property
    def draw(self) -> bytes:
        return self.seq.draw

    @property
    def token_ids(self) -> array[int]:
        return self.seq.token_ids + self.ahead

    @property
    def guide(self) -> Guide | None:
        return self.seq.guide

    @property
    def ahead(self) -> array[int]:
        return self.seq.proposed[: self.count]

    @property
    def answer_start(self) -> int:
        return self.seq.answer_start

    @property
    def num_output_tokens(self) -> int:
        return self.seq.num_output_tokens + self.count

    @property
    def takes_logits_as_they_are(self) -> bool:
        return not self.seq.adjusts and self.num_output_tokens >= self.sampling.min_tokens


class BlockHashes:
    """The chained hashes of a sequence's full blocks, extended as the sequence grows."""

    def __init__(self, root: bytes, block_size: int) -> None:
        self.root = root
        self._chain, self._block_size = [root], block_size

    def up_to(self, token_ids: array[int], num_blocks: int) -> list[bytes]:
        """Returns the names of the first `num_blocks` blocks of `token_ids`, which must be full."""
        self._extend(token_ids, num_blocks)
        return self._chain[1 : num_blocks + 1]

    def link(self, token_ids: array[int], block: int) -> tuple[bytes, bytes]:
        """Returns the name of one full block and its parent's name."""
        self._extend(token_ids, block + 1)
        return self._chain[block + 1], self._chain[block]

    def tail(self, token_ids: array[int], num_tokens: int) -> bytes:
        """Returns the name of the last block of the first `num_tokens` tokens, which may be part-full."""
        block = (num_tokens - 1) // self._block_size
        self._extend(token_ids, block)
        return next_hash(self._chain[block], token_ids[block * self._block_size : num_tokens])

    def _extend(self, token_ids: array[int], num_blocks: int) -> None:
        size = self._block_size
        for block in range(len(self._chain) - 1, num_blocks):
            self._chain.append(next_hash(self._chain[-1], token_ids[block * size : (block + 1) * size]))


def new_sequence(request: Request, arrival: int, layout: KVLayout, speculative: Speculative = OFF) -> Sequence:
    """Makes a waiting sequence of a request; `arrival` must increase with every request."""
    root = root_hash(layout.model, layout.revision, request.lora.revision if request.lora else "", request.cache_salt)
    return Sequence(
        request_id=request.request_id,
        key=(request.priority, arrival),
        sampling=request.sampling,
        token_ids=array("q", request.token_ids),
        num_prompt_tokens=len(request.token_ids),
        num_prior_tokens=request.num_prior_tokens,
        hashes=BlockHashes(root, layout.block_size),
        speculative=speculative,
        adapter=request.adapter,
        itl_target_s=request.itl_target_s,
        choice_id=request.choice_id or request.request_id,
        alone_until=request.alone_until,
        apart_until=request.num_prior_tokens + BEGUN_TOKENS if request.begins_apart else 0,
    )
