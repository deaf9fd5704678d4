"""Input and output of the engine: token ids, how to sample them, and where KV blocks go.

Request ── add / reserve ──> Engine ── step ──> SequenceOutput (SampledToken, FinishReason)
                               │ └── push ──> KVSink               a prefill's blocks, as they are computed
                               └── take_block_events ──> BlockStored, BlockRemoved      what the prefix cache holds
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from tandem.adapters import AdapterRef
from tandem.engine.step_time import StepTime
from tandem.sampling import SamplingParams
from tandem.speculative import OFF, Speculative

if TYPE_CHECKING:
    from torch import Tensor

    from tandem.engine.lora import Adapter


QUANTIZATIONS = ("none", "int8", "int4", "fp8")
KV_CACHE_DTYPES = ("auto", "int8")  # auto: what the model computes in


class FinishReason(enum.Enum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(slots=True, eq=False)
class Request:
    """A prompt to continue. Lower `priority` goes first; equal ones go in order of arrival.

    The last `num_prior_tokens` of `token_ids` are the answer's first ones, written by another engine: the answer goes
    on behind them as that engine would have gone on. `sampling` is of the whole answer. `speculative` None takes the
    engine's own. With a `lora`, `adapter` has its weights, as `Engine.adapters` gave them. Other prompts are prefilled
    in chunks that leave no more than `itl_target_s` between its tokens, where that is not 0 and can be kept.

    `choice_id` names it in the crash page, whatever engine it runs on; by default its request id. A suspect, of which
    an engine may have died, computes alone until there are `alone_until` tokens of its answer. Of those that begin
    apart, one begins at a time. With `dimensions`, 0 for all, the prompt's embedding is wanted.
    """

    request_id: str
    token_ids: list[int]
    sampling: SamplingParams
    priority: int = 0
    cache_salt: str = ""
    speculative: Speculative | None = None
    num_prior_tokens: int = 0
    lora: AdapterRef | None = None
    adapter: Adapter | None = None
    itl_target_s: float = 0.0
    choice_id: str = ""
    alone_until: int = 0
    begins_apart: bool = False
    dimensions: int | None = None


class SampledToken(NamedTuple):
    """A token and, where asked for, its log-probability and the most likely (token id, log-probability), best first.

    `rank`: how many tokens are at least as likely.
    """

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    rank: int = 0


@dataclass(slots=True)
class SequenceOutput:
    """One step's result for one sequence. `tokens[0]` is token `first_index` of its answer, counted from 0.

    `finished`: the sequence left the engine: with a finish reason, with an `error`, or (prefill only) with neither when
    decode should go on. Of `num_proposed_tokens` proposed so far `num_accepted_tokens` were right, each a step saved.
    `prompt_logprobs`: where asked for, with the first token: the prompt's tokens but the first. `batch_size` and
    `kv_usage`: where its worker says so, the sequences of that step and the share of KV blocks in use.
    """

    request_id: str
    first_index: int
    tokens: list[SampledToken]
    finish_reason: FinishReason | None = None
    num_cached_tokens: int = 0
    error: str | None = None
    finished: bool = False
    num_proposed_tokens: int = 0
    num_accepted_tokens: int = 0
    prompt_logprobs: list[SampledToken] = field(default_factory=list)
    batch_size: int = 0
    kv_usage: float = 0.0
    embedding: list[float] = field(default_factory=list)


class KVSink(Protocol):
    """Takes a prefill's KV blocks away. Called on the engine's thread."""

    def push(self, layer: int, first_block: int, block_ids: Sequence[int], kv: Tensor) -> None:
        """Copy logical prompt blocks `first_block`, `first_block + 1`, … out of `kv`, now or while `reading`.

        `kv` is the layer's whole cache (num_blocks, 2, num_kv_heads, block_size, row), `block_ids` where those
        blocks lie in it. Anything raised ends that sequence with `SequenceOutput.error` and disturbs nothing else.
        """

    @property
    def reading(self) -> bool:
        """True while pushed blocks are still to be copied: until then nobody else gets them, though the sequence
        left."""


@dataclass(frozen=True, slots=True)
class BlockStored:
    """A chain of blocks became findable: `hashes[0]` follows `parent`, each other one follows the one before it."""

    hashes: tuple[bytes, ...]
    parent: bytes


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """Blocks that can no longer be found."""

    hashes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A moment's load. `free_blocks`: referenced by no live sequence. `queued_tokens`: prompt tokens yet to compute.

    `num_prefilled_tokens` and `num_written_tokens`: prompt tokens and decoded ones computed since it began; of the
    decoded ones `num_accepted_tokens` were proposed, as were others that were refused. Of `num_preempted` times that a
    sequence had to leave its blocks, its KV went to host memory `num_swapped` times. `num_aborted` aborts released
    `num_aborted_blocks` blocks. `num_evicted_blocks` cached ones were overwritten.
    `likely_tokens`: of an answer, for which a reservation takes blocks.
    """

    num_waiting: int
    num_running: int
    num_reserved: int
    free_blocks: int
    num_blocks: int
    queued_tokens: int
    num_prefilled_tokens: int
    num_written_tokens: int
    num_proposed_tokens: int
    num_accepted_tokens: int
    num_preempted: int
    num_swapped: int
    num_aborted: int
    num_aborted_blocks: int
    num_evicted_blocks: int
    likely_tokens: int

    @property
    def kv_usage(self) -> float:
        """Share of the blocks that live sequences reference."""
        return 1 - self.free_blocks / self.num_blocks


@dataclass(frozen=True)
class EngineConfig:
    """Settings of an engine. The KV cache takes `num_blocks` blocks, or as many as `kv_budget_bytes` holds; None, on
    devices alone, takes what is left of `memory_share` of the device's memory, weights and steps having theirs.

    A step computes up to `max_num_batched_tokens`; 0: as suits the device, as do sequences on devices that are given no
    `max_num_seqs`. One that decodes computes only `max_prefill_beside_decode` of prompts, so that running answers go
    on. None makes that as many as take about a tenth of a second: on CPUs by what their arithmetic gives, which in such
    chunks is no slower; elsewhere as measured.

    As many sequences run as have a token in a step and a block in the cache, and no more than `max_num_seqs` if that is
    set. `max_model_len` None takes the model's; `num_threads` None takes torch's choice, within the CPUs that may be
    used; `revision` "" takes a fingerprint of the weights. `cpu_kernels` False keeps to torch where a whole pass could
    be computed in C; `cuda_graphs` replays steps that only decode. Through the folder `shared_cores` engines on one
    machine lend each other idle cores, beyond their own `num_threads`. `null` makes it a null engine, whose steps take
    as long as this says: `model_path` needs no weights, `dtype` is its own.

    `speculative` is how tokens are proposed where a request does not say; `draft` needs the `speculative_model`, a
    folder of a model with the same vocabulary, and medusa, eagle and eagle3 one of such heads. `jump_forward` computes
    what a grammar leaves no choice about in one step. Reservations are for half of a `likely_answer`, until the lengths
    of answers have been seen. `quantization` int8 or int4 makes the model's weights that when loaded; `kv_cache_dtype`
    int8 keeps KV so.
    Up to `swap_memory` bytes of the host hold the KV of preempted sequences; 0: all of it is computed again.
    LoRA adapters are read from folders below `lora_dir`, with `lora_hub` also from a hub, and take up to `lora_memory`
    bytes; with neither there are none.
    """

    model_path: Path
    model_name: str
    dtype: str = "auto"
    device: str = "cpu"
    block_size: int = 16
    kv_budget_bytes: int | None = 1 << 30
    memory_share: float = 0.9
    num_blocks: int | None = None
    max_num_batched_tokens: int = 512
    max_prefill_beside_decode: int | None = None
    max_num_seqs: int | None = None
    max_model_len: int | None = None
    enable_prefix_caching: bool = True
    num_threads: int | None = None
    shared_cores: Path | None = None
    revision: str = ""
    cpu_kernels: bool = True
    cuda_graphs: bool = False
    null: StepTime | None = None
    speculative: Speculative = OFF
    speculative_model: Path | None = None
    jump_forward: bool = True
    quantization: str = "none"
    kv_cache_dtype: str = "auto"
    likely_answer: int = 256
    swap_memory: int = 0
    lora_dir: Path | None = None
    lora_hub: bool = False
    lora_memory: int = 1 << 30

    def __post_init__(self) -> None:
        for name in ("block_size", "likely_answer", "lora_memory"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)} is not at least 1")
        if self.max_num_batched_tokens < 0:
            raise ValueError(f"max_num_batched_tokens: {self.max_num_batched_tokens} is not at least 0")
        if not 0 < self.memory_share < 1:
            raise ValueError(f"kv_memory: {self.memory_share} of a device is not between 0 and 1")
        optional = ("kv_budget_bytes", "num_blocks", "max_num_seqs", "max_model_len", "num_threads")
        for name in (*optional, "max_prefill_beside_decode"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}: {value} is not at least 1")
        if self.swap_memory < 0:
            raise ValueError(f"swap_memory: {self.swap_memory} is not at least 0")
        if self.num_blocks is None and self.kv_budget_bytes is None and self.device == "cpu":
            raise ValueError("kv_memory: a share is of a GPU's memory; on cpu say bytes, such as 4GiB")
        if self.quantization not in QUANTIZATIONS:
            raise ValueError(f"quantization: {self.quantization!r} is not one of {', '.join(QUANTIZATIONS)}")
        if self.kv_cache_dtype not in KV_CACHE_DTYPES:
            raise ValueError(f"kv_cache_dtype: {self.kv_cache_dtype!r} is not one of {', '.join(KV_CACHE_DTYPES)}")
        if self.quantization == "fp8" and self.device == "cpu":
            raise ValueError("quantization: fp8 is for GPUs; the device is cpu, which has int8")
        if self.cuda_graphs and self.device == "cpu":
            raise ValueError("cuda_graphs: the device is cpu, which has none")
        if self.lora_dir is not None and not self.lora_dir.is_dir():
            raise ValueError(f"lora_dir: {self.lora_dir} is no folder")
        if self.null and self.speculative_model:
            raise ValueError("speculative_model: the null engine has no model to draft for")

    def with_sizes(self, max_num_batched_tokens: int, max_num_seqs: int | None) -> EngineConfig:
        return replace(self, max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=max_num_seqs)


# (what is being loaded, bytes done, bytes in all)
Progress = Callable[[str, int, int], None]
