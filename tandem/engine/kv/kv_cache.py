"""Keys and values as a layer's KV cache holds them: unchanged, or in int8 with half of bfloat16's bytes.

A layer's cache is (num_blocks, 2, num_kv_heads, block_size, row). A row is head_dim numbers; in int8, head_dim codes
followed by the bytes of a bfloat16 scale: a block has, for each head of K and of V, a scale for each of its slots.

One scale for a whole block would make what it holds depend on how it was filled: a later token with greater numbers
would round those before it again, and so would a refused one. With a scale for each slot a block's bytes follow from
its tokens alone, whether they were computed in one chunk or several, one by one, by another worker or again after a
migration. For the same reason a token sees all keys and values as the cache holds them, those of its own step, too.
"""

from __future__ import annotations

import torch
from torch import Tensor

SCALE_BYTES = 2
LEAST = 1e-20  # the lower bound of a row's greatest number, so that no scale is 0


def row_size(dtype: torch.dtype, head_dim: int) -> int:
    """Returns the number of elements in a row of a cache of `dtype`."""
    return head_dim + SCALE_BYTES if dtype == torch.int8 else head_dim


def write_kv(kv: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Writes k, v (tokens, num_kv_heads, head_dim) to `slots` (tokens,): block * block_size + offset.

    Returns k and v as the cache holds them, rounded if it is int8.
    """
    blocks, offsets = slots // kv.shape[3], slots % kv.shape[3]
    rows = _coded(k) if kv.dtype == torch.int8 else k, _coded(v) if kv.dtype == torch.int8 else v
    for which, row in enumerate(rows):
        kv[blocks, which, :, offsets] = row
    return opened(rows[0], k.dtype), opened(rows[1], k.dtype)


def opened(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Converts rows of a cache (..., row) to numbers (..., head_dim) of `dtype`."""
    if rows.dtype != torch.int8:
        return rows
    scales = rows[..., -SCALE_BYTES:].view(torch.bfloat16).float()
    return (rows[..., :-SCALE_BYTES] * scales).to(dtype)


def _coded(numbers: Tensor) -> Tensor:
    numbers = numbers.float()
    scales = (numbers.abs().amax(dim=-1, keepdim=True).clamp(min=LEAST) / 127).bfloat16()
    codes = (numbers / scales.float()).round().clamp(-128, 127).to(torch.int8)
    return torch.cat([codes, scales.view(torch.int8)], dim=-1)
