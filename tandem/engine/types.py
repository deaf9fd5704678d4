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
KV_CACHE_DTYPES = ("auto", "int8")  # auto: the dtype in which the model computes


class FinishReason(enum.Enum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(slots=True, eq=False)
class Request:
    """A prompt to continue. Lower `priority` runs first; requests of equal priority run in order of arrival.

    The last `num_prior_tokens` of `token_ids` are the answer's first tokens, written by another engine: this engine
    continues the answer exactly as that engine would have. `sampling` applies to the whole answer. `speculative` None
    takes the engine's own. With a `lora`, `adapter` has its weights, from `Engine.adapters`. If `itl_target_s` is not
    0, other prompts are prefilled in chunks that keep the time between this answer's tokens below it, if possible.

    `choice_id` names the request in the crash page of any engine; "" takes the request id. A suspect, which may have
    killed an engine, computes alone until its answer has `alone_until` tokens. Requests that `begins_apart` begin one
    at a time. `dimensions` asks for the prompt's embedding, 0 for all its numbers. The blocks that it leaves
    in the cache are the `tenant`'s.
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
    tenant: str = ""


class SampledToken(NamedTuple):
    """A token and, if requested, its log-probability and the most likely (token id, log-probability), best first.

    `rank`: the number of tokens that are at least as likely as this one.
    """

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    rank: int = 0


@dataclass(slots=True)
class SequenceOutput:
    """The result of a step for a sequence. `tokens[0]` is token `first_index` of its answer, counted from 0.

    `finished`: the sequence has left the engine: with a finish reason, with an `error`, or, if prefill only, with
    neither: then decode continues it. `num_accepted_tokens` of `num_proposed_tokens` so far were right; each saved a
    step. `prompt_logprobs`: if requested, all prompt tokens but the first, reported with the answer's first token.
    `batch_size` and `kv_usage`: the sequences of that step and the share of KV blocks in use, if the worker sets them.
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
    """Receives a prefill's KV blocks. The engine's thread calls it."""

    def push(self, layer: int, first_block: int, block_ids: Sequence[int], kv: Tensor) -> None:
        """Copies logical prompt blocks `first_block`, `first_block + 1`, … out of `kv`, now or while `reading`.

        `kv` is the layer's whole cache (num_blocks, 2, num_kv_heads, block_size, row), `block_ids` are the blocks'
        places in it. An exception ends that sequence with `SequenceOutput.error` and affects no other sequence.
        """

    @property
    def reading(self) -> bool:
        """True while pushed blocks are still to be copied: no other sequence gets these blocks, even if this one has
        left."""


@dataclass(frozen=True, slots=True)
class BlockStored:
    """A chain of blocks became findable: `hashes[0]` follows `parent`, and each further hash the one before it."""

    hashes: tuple[bytes, ...]
    parent: bytes


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """Blocks that can no longer be found."""

    hashes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class EngineStats:
    """An engine's load now, and its counters since it began.

    `free_blocks`: blocks that no live sequence references. `queued_tokens`: prompt tokens still to compute.
    `num_prefilled_tokens`, `num_written_tokens`: prompt tokens and answer tokens computed so far.
    `num_proposed_tokens`, `num_accepted_tokens`: tokens proposed, and those of them that became answer tokens.
    `num_preempted`, `num_swapped`: preemptions, and those of them that copied the KV to host memory. `num_aborted`
    aborts released `num_aborted_blocks` blocks. `num_evicted_blocks`: cached blocks that were overwritten.
    `likely_tokens`: the answer tokens for which a reservation takes blocks.
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
        """The share of all blocks that live sequences reference."""
        return 1 - self.free_blocks / self.num_blocks


@dataclass(frozen=True)
class EngineConfig:
    """Settings of an engine.

    The KV cache takes `num_blocks` blocks, or as many as `kv_budget_bytes` holds. If both are None, which only GPUs
    allow, it takes what weights and steps leave of the share `memory_share` of the device's memory.

    A step computes up to `max_num_batched_tokens` tokens; 0 takes a number that suits the device, as `max_num_seqs`
    None does on GPUs. A step that decodes computes at most `max_prefill_beside_decode` prompt tokens, so that running
    answers continue. None takes as many as last about a tenth of a second: estimated on CPUs, where such chunks are no
    slower than larger ones, and measured on GPUs.

    At most as many sequences run as a step has tokens and the cache has blocks, and at most `max_num_seqs` if that is
    set. `max_model_len` None takes the model's; `num_threads` None takes torch's choice, limited to the usable CPUs;
    `revision` "" takes a fingerprint of the weights. `cpu_kernels` False computes with torch even where the C kernels
    could compute a whole pass; `cuda_graphs` replays steps that only decode. Through the folder `shared_cores`, engines
    on one machine lend each other idle cores, beyond their own `num_threads`. `null` makes a null engine, whose steps
    take the times that it sets: `model_path` then needs no weights, and `dtype` is ignored.

    `speculative` sets how tokens are proposed for requests that do not set it; the method draft needs
    `speculative_model`, the folder of a model with the same vocabulary; medusa, eagle and eagle3 need a folder of such
    heads there. `jump_forward` computes tokens that a grammar forces together in one step. A reservation takes blocks
    for half of `likely_answer` tokens until lengths of answers have been seen. `quantization` int8, int4 or fp8
    quantizes the weights when they are loaded; `kv_cache_dtype` int8 keeps KV in int8.
    Up to `swap_memory` bytes of the host hold the KV of preempted sequences; with 0, all of it is computed again.
    LoRA adapters are read from folders below `lora_dir`, with `lora_hub` also from a hub, and take up to `lora_memory`
    bytes; without both settings the engine takes no adapters. `tensor_parallel` processes of this machine, the ranks,
    share each layer's weights and compute each step together.
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
    tensor_parallel: int = 1

    def __post_init__(self) -> None:
        for name in ("block_size", "likely_answer", "lora_memory", "tensor_parallel"):
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
        if self.null and self.tensor_parallel > 1:
            raise ValueError("tensor_parallel: the null engine has no weights to share")
        if self.device != "cpu" and self.tensor_parallel > 1:
            raise ValueError("tensor_parallel: ranks share their KV cache in the host's memory, on GPUs not yet")

    def with_sizes(self, max_num_batched_tokens: int, max_num_seqs: int | None) -> EngineConfig:
        return replace(self, max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=max_num_seqs)


# Called with (name of what is being loaded, bytes done, bytes in all).
Progress = Callable[[str, int, int], None]
