"""FlashInfer as far as the engine uses it, in plain torch: pages, checked as its kernels need them; an exact softmax.

A wrapper for graphs reads nothing but the buffers it was made with, so a trace of it can be replayed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class BatchDecodeWithPagedKVCacheWrapper:
    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None,
        paged_kv_last_page_len_buffer: Tensor | None = None,
    ) -> None:
        assert float_workspace_buffer.dtype == torch.uint8
        assert kv_layout == "HND"
        self._buffers = (paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer)
        self._fixed, self._device = use_cuda_graph, float_workspace_buffer.device
        self._workspace_bytes, self._tensor_cores = len(float_workspace_buffer), use_tensor_cores
        assert all((buffer is not None) == use_cuda_graph for buffer in self._buffers)
        self.num_plans = 0

    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        check_pages(indptr, indices, last_page_len, page_size)
        self._shape = num_qo_heads, num_kv_heads, head_dim, page_size
        self._dtypes = q_data_type, kv_data_type
        self.num_plans += 1
        if self._fixed and self._tensor_cores:
            tiles = graph_workspace(len(last_page_len), num_qo_heads, num_kv_heads, head_dim)
            assert tiles <= self._workspace_bytes, "Buffer overflow when allocating memory for batch_prefill_tmp_v"
        self._most = int((indptr[1:] - indptr[:-1]).max())
        if not self._fixed:
            self._buffers = uploaded((indptr, indices, last_page_len), self._device)
            return
        for buffer, given in zip(self._buffers, (indptr, indices, last_page_len), strict=True):
            assert buffer is not None
            assert buffer.dtype == torch.int32
            assert len(given) == len(buffer) or (given is indices and len(given) < len(buffer))
            buffer[: len(given)].copy_(given, non_blocking=given is not indices or given.device == self._device)

    def reset_workspace_buffer(self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor) -> None:
        self._workspace_bytes = len(float_workspace_buffer)
        assert len(int_workspace_buffer) >= 8 << 20, "what plans may take"

    def run(self, q: Tensor, paged_kv_cache: Tensor) -> Tensor:
        starts, ids, last = self._buffers
        assert starts is not None
        assert ids is not None
        assert last is not None
        check_run(q, paged_kv_cache, self._shape, self._dtypes)
        rows = len(last)
        assert q.shape[0] == rows, "one token each"
        most = len(ids) // rows if self._fixed else self._most
        pages = starts[:-1, None].long() + torch.arange(most, device=q.device)
        table = ids[pages.clamp(max=len(ids) - 1)].long()
        lengths = (starts[1:] - starts[:-1] - 1) * self._shape[3] + last
        return exact(q[:, None], paged_kv_cache, table, lengths)[:, 0]


class BatchPrefillWithPagedKVCacheWrapper:
    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD") -> None:
        assert float_workspace_buffer.dtype == torch.uint8
        assert kv_layout == "HND"
        self._device = float_workspace_buffer.device

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool = False,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        assert causal
        assert qo_indptr.dtype == torch.int32
        assert len(qo_indptr) == len(paged_kv_indptr)
        check_pages(paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, page_size)
        self._queries, self._starts = qo_indptr.tolist(), paged_kv_indptr.tolist()
        self._pages = uploaded((paged_kv_indices, paged_kv_last_page_len), self._device)
        self._shape = num_qo_heads, num_kv_heads, head_dim_qk, page_size
        self._dtypes = q_data_type, kv_data_type

    def run(self, q: Tensor, paged_kv_cache: Tensor) -> Tensor:
        check_run(q, paged_kv_cache, self._shape, self._dtypes)
        assert self._queries[-1] == len(q)
        starts, (ids, last) = self._starts, self._pages
        found = []
        for i in range(len(last)):
            asked = q[self._queries[i] : self._queries[i + 1]]
            table = ids[starts[i] : starts[i + 1]].long()
            length = (len(table) - 1) * self._shape[3] + last[i : i + 1]
            found.append(exact(asked[None], paged_kv_cache, table[None], length)[0])
        return torch.cat(found)


def graph_workspace(rows: int, heads: int, kv_heads: int, head_dim: int) -> int:
    """Bytes that the real library's PrefillPlan takes for a graph of decodes, as of an H100."""
    group = heads // kv_heads
    tile = 16 if group <= 16 else 64 if group <= 64 or head_dim >= 256 else 128
    tiles = max(2 * 132 // kv_heads, -(-rows * group // tile) + rows - 1)
    return heads * tiles * tile * (head_dim + 1) * 4


def uploaded(given: tuple[Tensor, ...], device: torch.device) -> tuple[Tensor, ...]:
    return tuple(tensor.to(device, non_blocking=True) for tensor in given)


def check_pages(starts: Tensor, ids: Tensor, last: Tensor, page_size: int) -> None:
    assert {tensor.dtype for tensor in (starts, ids, last)} == {torch.int32}
    assert starts.device.type == last.device.type == "cpu", "a plan that reads device tensors waits for the device"
    assert len(starts) == len(last) + 1
    assert int(starts[0]) == 0
    assert int(starts[-1]) == len(ids)
    assert bool((starts[1:] > starts[:-1]).all())
    assert int(last.min()) >= 1
    assert int(last.max()) <= page_size


def check_run(q: Tensor, kv: Tensor, shape: tuple[int, ...], dtypes: tuple[Any, ...]) -> None:
    heads, kv_heads, head_dim, page_size = shape
    assert q.shape[1:] == (heads, head_dim)
    assert kv.shape[1:] == (2, kv_heads, page_size, head_dim)
    assert (q.dtype, kv.dtype) == dtypes


def exact(q: Tensor, kv: Tensor, tables: Tensor, lengths: Tensor) -> Tensor:
    """q (sequences, tokens, heads, head_dim), the last of contexts of `lengths` tokens in the pages `tables`."""
    head_dim = kv.shape[4]
    k, v = kv[tables].permute(2, 0, 3, 1, 4, 5).flatten(3, 4).double()
    places = torch.arange(k.shape[2], device=q.device)
    behind = places >= lengths[:, None]
    share = q.shape[2] // k.shape[1]
    k, v = (part.masked_fill(behind[:, None, :, None], 0).repeat_interleave(share, 1) for part in (k, v))
    scores = torch.einsum("sqhd,shkd->shqk", q.double(), k) / head_dim**0.5
    asked = lengths[:, None] - q.shape[1] + torch.arange(q.shape[1], device=q.device)
    weights = scores.masked_fill((places > asked[:, :, None])[:, None], -torch.inf).softmax(-1)
    return torch.einsum("shqk,shkd->sqhd", weights, v).to(q.dtype)
