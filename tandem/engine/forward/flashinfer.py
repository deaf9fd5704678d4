"""Paged attention by FlashInfer, where it is installed and has kernels for the model. Only this file knows it.

    planned   prompts' chunks and decodes in one call; a step of decodes alone by the kernels made for those
    fixed     its decode wrapper for CUDA graphs, which keeps what a replay reads in buffers of its own

Plans go to the device from memory of the host that a wrapper has once, so none is made before the last one has gone.

A cache of ours is one of theirs: pages of block_size tokens, of layout HND. Plans are made of tensors on the host, for
they are read there, and none waits for the device; but for graphs a plan copies the pages' ids to its own buffer, and
would wait where they come from the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, Protocol

import structlog
import torch
from torch import Tensor

from tandem.engine.device import Uploads, sent
from tandem.engine.forward.attention import FixedAttend, PagedAttention, StepAttend, TorchAttention

log = structlog.get_logger(__name__)
# What FlashInfer advises. Its kernels for graphs keep plans between replays, so each of those has its own.
WORKSPACE_BYTES, FIXED_WORKSPACE_BYTES = 128 << 20, 32 << 20
HEAD_DIMS = (64, 128, 256)
DTYPES = (torch.float16, torch.bfloat16)


class Library(Protocol):
    """The part of flashinfer that is used here."""

    BatchPrefillWithPagedKVCacheWrapper: Any
    BatchDecodeWithPagedKVCacheWrapper: Any


def paged_attention_for(kv: Tensor, num_heads: int) -> PagedAttention:
    """Attention for a cache: FlashInfer's where it works here, else torch's, and the log says why."""
    if not kv.is_cuda:
        return TorchAttention(kv)
    reason = misfit(kv)
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
        found = attention.planned([count], [count], [[0]])(q, q, q, kv)
        if not found.isfinite().all():
            raise RuntimeError("what it computes of zeros is no number")
    return attention


def misfit(kv: Tensor) -> str:
    """Why FlashInfer has no kernel for this cache, or nothing."""
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
    def of(cls, lengths: Tensor, tables: Tensor, block_size: int) -> Pages:
        """`tables` (sequences, blocks): what is in a row behind its context does not matter."""
        counts = (lengths + block_size - 1) // block_size
        used = torch.arange(tables.shape[1]) < counts[:, None]
        last = lengths - (counts - 1) * block_size
        return cls(_starts(counts), tables[used].int(), last.int())


class FlashInfer:
    """PagedAttention over caches like `kv`, by `library`."""

    def __init__(self, library: Library, kv: Tensor, num_heads: int) -> None:
        self._library, self._kv, self._num_heads = library, kv, num_heads
        self._uploads = Uploads(kv.device)  # of plans, from memory of the host that the next one writes to
        workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=kv.device)
        # The two take turns, step by step, in the order of the stream.
        self._mixed = library.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND")
        self._decode = library.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=self._wide)

    def planned(self, counts: Sequence[int], lengths: Sequence[int], tables: Sequence[Sequence[int]]) -> StepAttend:
        ends, width = torch.tensor(list(lengths)), max(map(len, tables))
        rows = torch.tensor([[*table, *[0] * (width - len(table))] for table in tables])
        pages = Pages.of(ends, rows, self._block_size)
        if max(counts) == 1:
            self._plan_decode(self._decode, pages)
            wrapper = self._decode
        else:
            wrapper = self._mixed
            self._plan(
                wrapper, _starts(torch.tensor(list(counts))), pages.starts, pages.ids, pages.last_lengths, *self._shape,
                causal=True, q_data_type=self._kv.dtype, kv_data_type=self._kv.dtype,
            )  # fmt: skip

        def attend(q: Tensor, k: Tensor, v: Tensor, kv: Tensor) -> Tensor:
            out: Tensor = wrapper.run(q, kv)
            return out

        return attend

    def fixed(self, lengths: Tensor, tables: Tensor) -> FixedAttend:
        size, device = len(lengths), self._kv.device
        buffers = (torch.zeros(n, dtype=torch.int32, device=device) for n in (size + 1, tables.numel(), size))
        workspace = torch.zeros(FIXED_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        wrapper = self._library.BatchDecodeWithPagedKVCacheWrapper(
            workspace, "HND", True, self._wide, *buffers
        )  # fmt: skip
        return _FixedFlashInfer(self, wrapper)

    def _plan_decode(self, wrapper: Any, pages: Pages) -> None:
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
class _FixedFlashInfer:
    attention: FlashInfer
    wrapper: Any

    def prepare(self, lengths: Tensor, tables: Tensor) -> None:
        pages = Pages.of(lengths, tables, self.attention._block_size)
        self.attention._plan_decode(self.wrapper, replace(pages, ids=sent(pages.ids, self.attention._kv.device)))

    def __call__(self, q: Tensor, kv: Tensor) -> Tensor:
        out: Tensor = self.wrapper.run(q, kv)
        return out


def _starts(counts: Tensor) -> Tensor:
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int()
