"""Paged attention by FlashInfer, if it is installed and has kernels for the model. Only this file uses FlashInfer.

    planned   prompts' chunks and decodes in one call; steps of decodes alone by FlashInfer's decode kernels
    fixed     FlashInfer's decode wrapper for CUDA graphs; a replay reads its inputs from buffers given to the wrapper

A wrapper writes its plans to one piece of host memory, from which the current stream copies them without a wait. So a
plan is made only after the copy of the last plan has happened. On the device, steps follow each other, as do a graph's
plan and its replay, so all wrappers share one workspace.

Our cache has FlashInfer's format: pages of block_size tokens, of layout HND. A plan takes tensors on the host, where
FlashInfer reads them, and must not wait for the device. Page ids, which may be many, therefore come from pinned memory.
For graphs, they are sent to the device first: the plan copies them to its buffer, and would wait for ids on the host.
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
# The size of the memory for a plan, as in FlashInfer.
PLAN_BYTES = 8 << 20
# The numbers of rows of which a graph is worth its memory.
SIZES = (1, 2, 4, *range(8, MOST_ROWS + 1, 8))
# The workspace that FlashInfer advises; models with many heads need more: see workspace_bytes.
LEAST_WORKSPACE = 128 << 20
# MOST_CTAS: the most tiles that prefill kernels run at once on any GPU. TILE: the rows of a tile. DECODE_TILES: (most
# query heads of a KV head, rows of a tile) where each row is a decode.
MOST_CTAS, TILE, DECODE_TILES = 2 * 160, 128, ((16, 16), (64, 64), (1 << 30, 128))
HEAD_DIMS = (64, 128, 256)
DTYPES = (torch.float16, torch.bfloat16)


class Library(Protocol):
    """The part of flashinfer that is used here."""

    BatchPrefillWithPagedKVCacheWrapper: Any
    BatchDecodeWithPagedKVCacheWrapper: Any


def paged_attention_for(kv: Tensor, num_heads: int, scopes: Iterable[Scope] = ()) -> PagedAttention:
    """Returns the attention for a cache: FlashInfer's if it works here, else torch's, logging the reason."""
    if not kv.is_cuda:
        return cpu_attention_for(kv, scopes)
    reason = misfit(kv, scopes)
    if not reason:
        try:
            return tried(import_module("flashinfer"), kv, num_heads)
        except ImportError as error:
            reason = f"{error}; install tandem[gpu]"
        except Exception as error:  # FlashInfer's compiler and kernels raise errors of many kinds
            reason = f"FlashInfer does not work here: {error}; its kernels need CUDA's compiler, as in CUDA_HOME"
    log.warning("attention by torch", reason=reason)
    return TorchAttention(kv)


def tried(library: Library, kv: Tensor, num_heads: int) -> FlashInfer:
    """Compiles FlashInfer's kernels, which takes minutes the first time, runs them once and returns the attention.

    Raises whatever error the compiler or the kernels raise.
    """
    attention = FlashInfer(library, kv, num_heads)
    for count in (1, 2):
        q = kv.new_zeros(count, num_heads, kv.shape[4])
        found = attention.planned([count], [count], [[0]])(q, q, q, kv, Scope())
        if not found.isfinite().all():
            raise RuntimeError("what it computes of zeros is no number")
    return attention


def misfit(kv: Tensor, scopes: Iterable[Scope] = ()) -> str:
    """Returns why FlashInfer has no kernel for this cache and these scopes; empty if it has one."""
    if not all(scope.is_plain and not scope.window and not scope.is_latent for scope in scopes):
        return "FlashInfer is used where layers see all tokens, by scores as they come"
    if kv.dtype not in DTYPES:
        return f"FlashInfer has no kernel for {kv.dtype}"
    return "" if kv.shape[-1] in HEAD_DIMS else f"FlashInfer has no kernel for heads of {kv.shape[-1]}"


@dataclass(frozen=True, slots=True)
class Pages:
    """Contexts in FlashInfer's form, int32 on the host: sequence i has the pages `ids[starts[i] : starts[i + 1]]`."""

    starts: Tensor
    ids: Tensor
    last_lengths: Tensor

    @classmethod
    def of(cls, lengths: Sequence[int], tables: Sequence[Sequence[int]], block_size: int) -> Pages:
        """Makes the pages of contexts of `lengths` tokens; a table may have more blocks than its context needs."""
        counts = [-(-length // block_size) for length in lengths]
        used = (table[:count] for table, count in zip(tables, counts, strict=True))
        last = (length - (count - 1) * block_size for length, count in zip(lengths, counts, strict=True))
        return cls(_starts(counts), _int32(chain.from_iterable(used)), _int32(last))


class FlashInfer:
    """PagedAttention by `library` over caches with the shape and dtype of `kv`."""

    gathered_layers = 0

    def __init__(self, library: Library, kv: Tensor, num_heads: int, uploads: Uploads | None = None) -> None:
        self._library, self._kv, self._num_heads = library, kv, num_heads
        self._uploads = uploads or Uploads(kv.device)  # guards the host memory of plans
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
        """Returns one shape for each number of rows: a replay reads only a context's blocks, whatever their maximum."""
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
    """Device memory that all graphs share, one at a time: the plan and the pages of the graph that runs."""

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
    """Returns the bytes in which FlashInfer's kernels merge partial results of a context.

    Each head and row needs a float32 vector and its weight, for all tiles that run at once or that MOST_ROWS decodes
    of a graph need.
    """
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
