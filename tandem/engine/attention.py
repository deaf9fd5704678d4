"""Attention over a paged KV cache, in plain torch.

    write    k, v of the step's tokens into their slots of the cache
    attend   per group of sequences that ask equally many tokens: gather their blocks, mask what lies ahead, SDPA

A layer's cache is (num_blocks, 2, num_kv_heads, block_size, head_dim).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Group:
    """Neighbouring sequences of a step with `query_len` tokens each, tokens `start` … `end` of its row.

    block_tables (sequences, blocks) repeats a sequence's first block where it has no more; `visible` (sequences, 1,
    query_len, blocks * block_size) says what each token may see. `last_block` (sequences,) is the block that the
    context ends in and `unwritten` (sequences, 1, 1, block_size, 1) its slots behind that end.
    """

    start: int
    end: int
    query_len: int
    block_tables: Tensor
    visible: Tensor
    last_block: Tensor
    unwritten: Tensor


def make_group(start: int, query_len: int, tables: list[list[int]], lengths: list[int], block_size: int) -> Group:
    """Sequences whose contexts, `query_len` new tokens included, are `lengths` tokens in the blocks of `tables`."""
    width = max(-(-length // block_size) for length in lengths)
    blocks = torch.tensor([(table + [table[0]] * (width - len(table)))[:width] for table in tables])
    ends = torch.tensor(lengths)
    asked = ends[:, None] - query_len + torch.arange(query_len)
    visible = torch.arange(width * block_size) <= asked[:, None, :, None]
    last_block = (ends - 1) // block_size
    unwritten = torch.arange(block_size) >= (ends - last_block * block_size)[:, None]
    end = start + query_len * len(tables)
    return Group(start, end, query_len, blocks, visible, last_block, unwritten[:, None, None, :, None])


def to_device(group: Group, device: str) -> Group:
    blocks, visible = group.block_tables.to(device), group.visible.to(device)
    last_block, unwritten = group.last_block.to(device), group.unwritten.to(device)
    return Group(group.start, group.end, group.query_len, blocks, visible, last_block, unwritten)


def write_kv(kv: Tensor, blocks: Tensor, offsets: Tensor, k: Tensor, v: Tensor) -> None:
    """Put k, v (tokens, num_kv_heads, head_dim) at `offsets` (tokens,) of `blocks` (tokens,)."""
    kv[blocks, 0, :, offsets] = k
    kv[blocks, 1, :, offsets] = v


def paged_attention(q: Tensor, kv: Tensor, groups: list[Group]) -> Tensor:
    """q (tokens, heads, head_dim) over the cache `kv`; returns the same shape."""
    out = torch.empty_like(q)
    for group in groups:
        out[group.start : group.end] = _group_attention(q[group.start : group.end], kv, group)
    return out


def _group_attention(q: Tensor, kv: Tensor, group: Group) -> Tensor:
    num_seqs, width = group.block_tables.shape
    _, _, kv_heads, block_size, head_dim = kv.shape
    past = kv[group.block_tables]  # (sequences, blocks, 2, kv_heads, block_size, head_dim)
    # A masked slot still counts as 0 * its content, and what another sequence left there may be NaN.
    rows = torch.arange(num_seqs, device=kv.device)
    past[rows, group.last_block] = past[rows, group.last_block].masked_fill(group.unwritten, 0)
    k, v = past.permute(2, 0, 3, 1, 4, 5).reshape(2, num_seqs, kv_heads, width * block_size, head_dim)
    # Query heads that share a KV head are rows of one product: (sequences, kv_heads, share * query_len, head_dim).
    share = q.shape[1] // kv_heads
    shape = (num_seqs, group.query_len, kv_heads, share, head_dim)
    query = q.view(shape).permute(0, 2, 3, 1, 4).reshape(num_seqs, kv_heads, -1, head_dim)
    visible = group.visible if group.query_len == 1 else group.visible.repeat(1, 1, share, 1)
    out = F.scaled_dot_product_attention(query, k, v, attn_mask=visible)
    out = out.view(num_seqs, kv_heads, share, group.query_len, head_dim).permute(0, 3, 1, 2, 4)
    return out.reshape(q.shape)
