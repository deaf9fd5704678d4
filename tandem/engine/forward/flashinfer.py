"""Paged attention by FlashInfer, where it is installed and has kernels for the model. Only this file knows it.

    planned   prompts' chunks and decodes in one call; a step of decodes alone by the kernels made for those
    fixed     its decode wrapper for CUDA graphs, which keeps what a replay reads in buffers that it is given

A plan is written to memory of the host that its wrapper has once, copied from there on the current stream, and nobody
waits for that copy: so none is made before the last one's has happened. On the device steps, and a graph's plan and its
replay, follow each other, so wrappers share what they plan and compute in.

A cache of ours is one of theirs: pages of block_size tokens, of layout HND. Plans are made of tensors on the host, for
they are read there, and none waits for the device: ids of pages, which may be many, come from pinned memory; for graphs
they are sent before, for a plan copies them to its buffer, and would wait where they come from the host.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import accumulate, chain
from typing import Any, Protocol

import structlog
import torch
from torch import Tensor

from tandem.engine.device import Uploads, pinned, sent
from tandem.engine.forward.attention import (
    MOST_ROWS,
    FixedAttend,
    PagedAttention,
    Shape,
    StepAttend,
    TorchAttention,
)
from tandem.engine.forward.float32 import cpu_attention_for
from tandem.engine.models import Scope

log = structlog.get_logger(__name__)
# Of plans, as FlashInfer has it.
PLAN_BYTES = 8 << 20
# Rows of a graph, as they are worth their memory.
SIZES = (1, 2, 4, *range(8, MOST_ROWS + 1, 8))
# FlashInfer advises so much; more where heads are many: see workspace_bytes.
LEAST_WORKSPACE = 128 << 20
# At most, of a device, that its prefill kernels run at once; rows of their tiles, fewer where each row is a decode's.
MOST_CTAS, TILE, DECODE_TILES = 2 * 160, 128, ((16, 16), (64, 64), (1 << 30, 128))
HEAD_DIMS = (64, 128, 256)
DTYPES = (torch.float16, torch.bfloat16)


class Library(Protocol):
    """The part of flashinfer that is used here."""

    BatchPrefillWithPagedKVCacheWrapper: Any
    BatchDecodeWithPagedKVCacheWrapper: Any


def paged_attention_for(kv: Tensor, num_heads: int, scopes: Iterable[Scope] = ()) -> PagedAttention:
    """Attention for a cache: FlashInfer's where it works here, else torch's, and the log says why."""
    if not kv.is_cuda:
        return cpu_attention_for(kv, scopes)
    reason = misfit(kv, scopes)
    if not reason:
        try:
            return tried(import_module("flashinfer"), kv, num_heads)
        except ImportError as error:
            reason = f"{error}; install tandem[gpu]"
        except Exception as error:  # its compiler and its kernels raise errors of many kinds
            reason = f"FlashInfer does not work here: {error}; its kernels need CUDA's compiler, as in CUDA_HOME"
    log.warning("attention by torch", reason=reason)
    return TorchAttention(kv)


def tried(library: Library, kv: Tensor, num_heads: int) -> FlashInfer:
    """One whose kernels have been compiled, which takes minutes at first, and have run. Raises what they raise."""
    attention = FlashInfer(library, kv, num_heads)
    for count in (1, 2):
        q = kv.new_zeros(count, num_heads, kv.shape[4])
        found = attention.planned([count], [count], [[0]])(q, q, q, kv, Scope())
        if not found.isfinite().all():
            raise RuntimeError("what it computes of zeros is no number")
    return attention


def misfit(kv: Tensor, scopes: Iterable[Scope] = ()) -> str:
    """Why FlashInfer has no kernel for this cache and what layers see of it, or nothing."""
    if not all(scope.is_plain and not scope.window and not scope.is_latent for scope in scopes):
        return "FlashInfer is used where layers see all tokens, by scores as they come"
    if kv.dtype not in DTYPES:
        return f"FlashInfer has no kernel for {kv.dtype}"
    return "" if kv.shape[-1] in HEAD_DIMS else f"FlashInfer has no kernel for heads of {kv.shape[-1]}"


@dataclass(frozen=True, slots=True)
class Pages:
    """Contexts as FlashInfer has them, int32 on the host: those of sequence i are `ids[starts[i] : starts[i + 1]]`."""

    starts: Tensor
    ids: Tensor
    last_lengths: Tensor

    @classmethod
    def of(cls, lengths: Sequence[int], tables: Sequence[Sequence[int]], block_size: int) -> Pages:
        """A table may go on behind its context."""
        counts = [-(-length // block_size) for length in lengths]
        used = (table[:count] for table, count in zip(tables, counts, strict=True))
        last = (length - (count - 1) * block_size for length, count in zip(lengths, counts, strict=True))
        return cls(_starts(counts), _int32(chain.from_iterable(used)), _int32(last))


class FlashInfer:
    """PagedAttention over caches like `kv`, by `library`."""

    gathered_layers = 0

    def __init__(self, library: Library, kv: Tensor, num_heads: int, uploads: Uploads | None = None) -> None:
        self._library, self._kv, self._num_heads = library, kv, num_heads
        self._uploads = uploads or Uploads(kv.device)  # of plans, from memory of the host that the next one writes to
        size = workspace_bytes(num_heads, kv.shape[2], kv.shape[4])
        self._workspace = torch.zeros(size, dtype=torch.uint8, device=kv.device)
        self._mixed = library.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "HND")
        self._decode = library.BatchDecodeWithPagedKVCacheWrapper(self._workspace, "HND", use_tensor_cores=self._wide)
        self._fixed: Buffers | None = None

    def planned(self, counts: Sequence[int], lengths: Sequence[int], tables: Sequence[Sequence[int]]) -> StepAttend:
        pages = Pages.of(lengths, tables, self._block_size)
        pages = replace(pages, ids=pinned(pages.ids, self._kv.device))
        if max(counts) == 1:
            self.plan_decode(self._decode, pages)
            wrapper = self._decode
        else:
            wrapper = self._mixed
            self._plan(
                wrapper, _starts(counts), pages.starts, pages.ids, pages.last_lengths, *self._shape,
                causal=True, q_data_type=self._kv.dtype, kv_data_type=self._kv.dtype,
            )  # fmt: skip

        def attend(q: Tensor, k: Tensor, v: Tensor, kv: Tensor, scope: Scope) -> Tensor:
            out: Tensor = wrapper.run(q, kv)
            return out

        return attend

    def shapes(self, rows: int, blocks: int, num_blocks: int) -> list[Shape]:
        """It reads no more than a context has, however many blocks it may have."""
        most = min(rows, MOST_ROWS)
        return [(size, blocks) for size in SIZES if size < most] + [(next(s for s in SIZES if s >= most), blocks)]

    def fixed(self, shape: Shape, padding_block: int) -> FixedAttend:
        size, width = shape
        if self._fixed is None or len(self._fixed.ids) < size * width:
            self._fixed = Buffers.of(size, width, self._kv.device)
        buffers = self._fixed
        wrapper = self._library.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace, "HND", True, self._wide, buffers.starts[: size + 1], buffers.ids, buffers.last[:size]
        )
        wrapper.reset_workspace_buffer(self._workspace, buffers.plan)
        return _FixedFlashInfer(self, wrapper, size, padding_block)

    def pages_on_device(self, lengths: Sequence[int], tables: Sequence[Sequence[int]]) -> Pages:
        pages = Pages.of(lengths, tables, self._block_size)
        return replace(pages, ids=sent(pages.ids, self._kv.device))

    def plan_decode(self, wrapper: Any, pages: Pages) -> None:
        dtype = self._kv.dtype
        self._plan(
            wrapper, pages.starts, pages.ids, pages.last_lengths, *self._shape, q_data_type=dtype, kv_data_type=dtype
        )  # fmt: skip

    def _plan(self, wrapper: Any, *given: Any, **options: Any) -> None:
        self._uploads.done()
        wrapper.plan(*given, **options)
        self._uploads.begun()

    @property
    def _shape(self) -> tuple[int, int, int, int]:
        return self._num_heads, self._kv.shape[2], self._kv.shape[4], self._block_size

    @property
    def _block_size(self) -> int:
        return self._kv.shape[3]

    @property
    def _wide(self) -> bool:
        """True if enough query heads share a KV head for tensor cores to pay."""
        return self._num_heads // self._kv.shape[2] >= 4


@dataclass(frozen=True, slots=True)
class Buffers:
    """Memory that graphs read, one after the other: the plan of the one that runs, and its pages."""

    plan: Tensor
    starts: Tensor
    ids: Tensor
    last: Tensor

    @classmethod
    def of(cls, rows: int, width: int, device: torch.device) -> Buffers:
        numbers = (torch.zeros(n, dtype=torch.int32, device=device) for n in (rows + 1, rows * width, rows))
        return cls(torch.zeros(PLAN_BYTES, dtype=torch.uint8, device=device), *numbers)


@dataclass(frozen=True, slots=True)
class _FixedFlashInfer:
    attention: FlashInfer
    wrapper: Any
    size: int
    padding_block: int

    def prepare(self, lengths: Sequence[int], tables: Sequence[Sequence[int]]) -> None:
        more = self.size - len(lengths)
        pages = self.attention.pages_on_device([*lengths, *[1] * more], [*tables, *[[self.padding_block]] * more])
        self.attention.plan_decode(self.wrapper, pages)

    def __call__(self, q: Tensor, kv: Tensor, scope: Scope) -> Tensor:
        out: Tensor = self.wrapper.run(q, kv)
        return out


def workspace_bytes(num_heads: int, kv_heads: int, head_dim: int) -> int:
    """For what its kernels put together of a context's pieces: a float32 vector and its weight for each head and row of
    the tiles that run at once, or, in graphs, that so many decodes may need."""
    group = num_heads // kv_heads
    tile = next(rows for most, rows in DECODE_TILES if group <= most)
    decodes = (-(-MOST_ROWS * group // tile) + MOST_ROWS) * tile
    rows = max(-(-MOST_CTAS // kv_heads) * TILE, decodes)
    return max(LEAST_WORKSPACE, num_heads * rows * (head_dim + 1) * 4 + 1024)


def _starts(counts: Sequence[int]) -> Tensor:
    return _int32(accumulate(counts, initial=0))


def _int32(values: Iterable[int]) -> Tensor:
    made = array("i", values)
    return torch.frombuffer(made, dtype=torch.int32)
