"""Attention over a paged KV cache: one small interface, and what it is in plain torch.

    planned   once a step: who asks how many tokens, over which blocks    ──> attends in each layer of that step
    fixed     once a size: decode steps of so many sequences, whose       ──> attends in each layer of each of them
              lengths and tables lie where they always lie

In torch, per group of sequences that ask equally many tokens: gather their blocks, mask what lies ahead, SDPA; a
prompt's first chunk needs nothing of the cache: its own k, v, and SDPA's causal way. `flashinfer` has the other one.
In float32 on a CPU a token's attention is the same bit for bit whatever lies beside it in a step: by `float32`'s
kernels, and where they cannot compute it by `attention_alone`.

A layer's cache is (num_blocks, 2, num_kv_heads, block_size, row), with rows as kv_cache.py has them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.engine.device import sent
from tandem.engine.forward.staged import Staged
from tandem.engine.kv import opened
from tandem.engine.models import ROWS_ALIKE, Scope, is_exact

# Attention of one step, planned once for all layers. A model's own `Attend` names the layer and knows no cache: Forward
# makes it of this one, which knows the cache and no layer.
# q, k, v of a step's tokens (tokens, heads, head_dim), k and v as the cache holds them, that cache, scope ──> as q.
StepAttend: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor, Scope], Tensor]
# With fewer keys than the first a product goes another way; above some two hundred BLAS cuts a sum by its length.
KEYS_ALIKE, KEYS_AT_ONCE = 16, 128
PLAIN = Scope()


# Rows of a graph, one token of a sequence each, and the most blocks of a row's context.
Shape: TypeAlias = tuple[int, int]
MOST_ROWS = 256


class FixedAttend(Protocol):
    """Attention of decode steps that are replayed from static memory: no shape and no branch depends on what that
    holds."""

    def prepare(self, lengths: Sequence[int], tables: Sequence[Sequence[int]]) -> None:
        """Before each replay, with the contexts it is for; further rows see one token of the padding's block."""

    def __call__(self, q: Tensor, kv: Tensor, scope: Scope) -> Tensor:
        """q (rows, heads, head_dim), one token each."""


class PagedAttention(Protocol):
    gathered_layers: int  # of KV, that it may copy at once

    def planned(self, counts: Sequence[int], lengths: Sequence[int], tables: Sequence[Sequence[int]]) -> StepAttend:
        """For a step: of sequence i there are `counts[i]` tokens, the last being number `lengths[i]` of the context in
        the blocks `tables[i]`. Void when the next step is planned."""

    def shapes(self, rows: int, blocks: int, num_blocks: int) -> list[Shape]:
        """For which graphs of decode steps are worth their memory: up to so many rows, of up to so many blocks each, of
        a cache of `num_blocks`."""

    def fixed(self, shape: Shape, padding_block: int) -> FixedAttend:
        """For decode steps of that shape."""


class TorchAttention:
    """PagedAttention on any device; `kv` is the cache of any layer."""

    gathered_layers = 4

    def __init__(self, kv: Tensor) -> None:
        self._kv = kv

    def planned(self, counts: Sequence[int], lengths: Sequence[int], tables: Sequence[Sequence[int]]) -> StepAttend:
        groups = _groups(counts, lengths, tables, self._kv)

        def attend(q: Tensor, k: Tensor, v: Tensor, kv: Tensor, scope: Scope) -> Tensor:
            out = q.new_empty(q.shape)
            paged_attention(q, k, v, kv, groups, scope, out)
            return out

        return attend

    def shapes(self, rows: int, blocks: int, num_blocks: int) -> list[Shape]:
        """Each gathers all that its contexts may have: powers of two, as long as the cache holds about as much."""
        return [
            (size, width)
            for size in _powers(min(rows, MOST_ROWS))
            for width in _powers(blocks)
            if size * width <= 2 * num_blocks
        ]

    def fixed(self, shape: Shape, padding_block: int) -> FixedAttend:
        return TorchFixedAttend(shape, padding_block, self._kv.device)


class TorchFixedAttend:
    """Reads lengths and tables where they lie on the device."""

    def __init__(self, shape: Shape, padding_block: int, device: torch.device) -> None:
        self._shape = size, width = shape
        self._staged = Staged(
            torch.cat([torch.ones(size, dtype=torch.int64), torch.full((size * width,), padding_block)]), device
        )
        self._lengths, self._tables = self._parts(self._staged.device)

    def prepare(self, lengths: Sequence[int], tables: Sequence[Sequence[int]]) -> None:
        ends, rows = self._parts(self._staged.blank())
        if lengths:
            width = max(map(len, tables))
            ends[: len(lengths)] = torch.tensor(lengths)
            rows[: len(tables), :width] = torch.tensor(
                [[*table, *[table[0]] * (width - len(table))] for table in tables]
            )
        self._staged.send()

    def __call__(self, q: Tensor, kv: Tensor, scope: Scope) -> Tensor:
        return paged_decode(q, kv, self._tables, self._lengths, scope)

    def _parts(self, row: Tensor) -> tuple[Tensor, Tensor]:
        size, width = self._shape
        return row[:size], row[size:].view(size, width)


def _powers(most: int) -> list[int]:
    """Powers of two, the last of them the first that is not below `most`."""
    return [1 << n for n in range((most - 1).bit_length() + 1)]


@dataclass(frozen=True, slots=True)
class Group:
    """Neighbouring sequences of a step with `query_len` tokens each, tokens `start` … `end` of its row.

    `slabs` (2, sequences, kv_heads, blocks) are the contexts' parts of the cache, each one block's K or V of one head;
    where a sequence has no more blocks its first one is repeated. `behind` (sequences, 1, query_len, blocks *
    block_size) says how many tokens behind each token one is, below 0 where it lies ahead, `last_block` (sequences,)
    which block the context ends in and `unwritten` (sequences, 1, 1, block_size, 1) that block's slots behind the end.
    """

    start: int
    end: int
    query_len: int
    slabs: Tensor
    behind: Tensor
    last_block: Tensor
    unwritten: Tensor


def make_group(start: int, query_len: int, tables: list[list[int]], lengths: list[int], kv: Tensor) -> Group:
    """Sequences whose contexts, `query_len` new tokens included, are `lengths` tokens in the blocks of `tables`.

    `kv` is the cache of any layer.
    """
    kv_heads, block_size = kv.shape[2:4]
    width = max(-(-length // block_size) for length in lengths)
    blocks = torch.tensor([(table + [table[0]] * (width - len(table)))[:width] for table in tables])
    slabs = blocks[None, :, None, :] * 2 * kv_heads + torch.arange(2 * kv_heads).view(2, 1, kv_heads, 1)
    ends = torch.tensor(lengths)
    asked = ends[:, None] - query_len + torch.arange(query_len)
    behind = asked[:, None, :, None] - torch.arange(width * block_size)
    last_block = (ends - 1) // block_size
    unwritten = (torch.arange(block_size) >= (ends - last_block * block_size)[:, None])[:, None, None, :, None]
    end = start + query_len * len(tables)
    tensors = (sent(tensor, kv.device) for tensor in (slabs, behind, last_block, unwritten))
    return Group(start, end, query_len, *tensors)


@dataclass(frozen=True, slots=True)
class FirstChunk:
    """Tokens `start` … `end` of a step's row: one sequence's first."""

    start: int
    end: int


def paged_attention(
    q: Tensor, k: Tensor, v: Tensor, kv: Tensor, groups: Sequence[Group | FirstChunk], scope: Scope, out: Tensor
) -> None:
    """q (tokens, heads, head_dim) of `groups` over the cache `kv`, or the step's own k, v, into `out`, of q's shape."""
    for group in groups:
        here = slice(group.start, group.end)
        if isinstance(group, FirstChunk):
            out[here] = _causal_attention(q[here], k[here], v[here], scope)
        else:
            out[here] = _group_attention(q[here], kv, group, scope)


def _causal_attention(q: Tensor, k: Tensor, v: Tensor, scope: Scope) -> Tensor:
    if is_exact(q) or not scope.is_plain or scope.window or scope.is_latent:
        places = torch.arange(len(q), device=q.device)
        seen = _visible((places[:, None] - places)[None, None], scope)
        return _grouped(q, k.transpose(0, 1)[None], v.transpose(0, 1)[None], seen, scope)
    q, k, v = (tensor.transpose(0, 1)[None] for tensor in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)


def _group_attention(q: Tensor, kv: Tensor, group: Group, scope: Scope) -> Tensor:
    k, v = _gather(kv, group, q.dtype)
    return _grouped(q, k, v, _visible(group.behind, scope), scope)


def _visible(behind: Tensor, scope: Scope) -> Tensor:
    """True for what a token sees of those that are so many tokens behind it."""
    return (behind >= 0) & (behind < scope.window) if scope.window else behind >= 0


def _grouped(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scope: Scope) -> Tensor:
    """q (tokens, heads, head_dim) of sequences with equally many tokens, over k, v (sequences, heads, keys, head_dim)
    where they are `visible` (sequences, 1, tokens of each, keys)."""
    k, v = _as_seen(k, v, scope)
    (num_seqs, kv_heads), query_len = k.shape[:2], visible.shape[2]
    # Query heads that share a KV head are rows of one product: (sequences, kv_heads, share * query_len, head_dim).
    share, head_dim = q.shape[1] // kv_heads, q.shape[2]
    query = q.view(num_seqs, query_len, kv_heads, share, head_dim).permute(0, 2, 3, 1, 4)
    query = query.reshape(num_seqs, kv_heads, -1, head_dim)
    if query_len > 1:
        visible = visible.repeat(1, 1, share, 1)
    out = _attention(query, k, v, visible, scope)
    out = out.view(num_seqs, kv_heads, share, query_len, head_dim).permute(0, 3, 1, 2, 4)
    return out.reshape(q.shape)


def _as_seen(k: Tensor, v: Tensor, scope: Scope) -> tuple[Tensor, Tensor]:
    if not scope.is_latent:
        return k, v
    whole = torch.cat((k, v), dim=-1)
    return whole, whole


def _attention(query: Tensor, k: Tensor, v: Tensor, visible: Tensor, scope: Scope) -> Tensor:
    """query (sequences, kv_heads, rows, head_dim) over k, v (sequences, kv_heads, keys, head_dim)."""
    if is_exact(query) or not scope.is_plain:
        return attention_alone(query, k, v, visible, scope)
    return F.scaled_dot_product_attention(query, k, v, attn_mask=visible)


def attention_alone(query: Tensor, k: Tensor, v: Tensor, visible: Tensor, scope: Scope = PLAIN) -> Tensor:
    """As SDPA, but each row's sums go the same way whatever rows, keys that it may not see and sequences lie beside it.

    Products whose shapes BLAS takes the same kernel for, and sums over keys that are too short to be cut anew.
    """
    rows, keys = query.shape[2], k.shape[2]
    query = F.pad(query, (0, 0, 0, -rows % ROWS_ALIKE)) * query.shape[3] ** -0.5
    if missing := -keys % KEYS_ALIKE:
        k, v, visible = F.pad(k, (0, 0, 0, missing)), F.pad(v, (0, 0, 0, missing)), F.pad(visible, (0, missing))
    scores = (query @ k.transpose(2, 3)).float()
    if scope.softcap:
        scores = (scores / scope.softcap).tanh_() * scope.softcap
    scores[:, :, :rows].masked_fill_(~visible, -math.inf)
    weights = _shares(scores, rows, scope.sinks).to(v.dtype)
    out = weights[..., :KEYS_AT_ONCE] @ v[:, :, :KEYS_AT_ONCE]
    for start in range(KEYS_AT_ONCE, k.shape[2], KEYS_AT_ONCE):
        out += weights[..., start : start + KEYS_AT_ONCE] @ v[:, :, start : start + KEYS_AT_ONCE]
    return out[:, :, :rows]


def _shares(scores: Tensor, rows: int, sinks: Tensor | None) -> Tensor:
    """Each key's share of a row of `scores` (sequences, kv_heads, rows and what pads them, keys)."""
    if sinks is None:
        return scores.softmax(dim=-1)
    # In front of the keys, which then lie where they would lie without it.
    beside = scores.new_full((*scores.shape[:3], KEYS_ALIKE), -math.inf)
    kv_heads = scores.shape[1]
    share = len(sinks) // kv_heads
    beside[:, :, :rows, 0] = sinks.float().view(kv_heads, share).repeat_interleave(rows // share, dim=1)
    beside[:, :, rows:, 0] = 0
    return torch.cat((beside, scores), dim=-1).softmax(dim=-1)[..., KEYS_ALIKE:]


def _gather(kv: Tensor, group: Group, dtype: torch.dtype) -> Tensor:
    """K and V of the group's contexts: (2, sequences, kv_heads, blocks * block_size, head_dim)."""
    block_size, row = kv.shape[3:]
    past = kv.view(-1, block_size * row).index_select(0, group.slabs.view(-1))
    past = opened(past.view(*group.slabs.shape, block_size, row), dtype)
    # A masked slot still counts as 0 * its content, and what another sequence left there may be NaN.
    rows = torch.arange(len(group.last_block), device=kv.device)
    ends = past[:, rows, :, group.last_block]  # (sequences, 2, kv_heads, block_size, head_dim)
    past[:, rows, :, group.last_block] = ends.masked_fill(group.unwritten, 0)
    return past.flatten(3, 4)


def paged_decode(q: Tensor, kv: Tensor, tables: Tensor, lengths: Tensor, scope: Scope = PLAIN) -> Tensor:
    """q (sequences, heads, head_dim), one token each, over contexts of `lengths` tokens in blocks `tables`."""
    num_seqs, _, head_dim = q.shape
    _, _, kv_heads, block_size, _ = kv.shape
    past = opened(kv[tables], q.dtype).permute(2, 0, 3, 1, 4, 5)
    past = past.reshape(2, num_seqs, kv_heads, -1, past.shape[-1])
    behind = lengths[:, None] - 1 - torch.arange(tables.shape[1] * block_size, device=q.device)
    # A masked slot still counts as 0 * its content, and what another sequence left there may be NaN.
    k, v = past.masked_fill((behind < 0)[None, :, None, :, None], 0)
    k, v = _as_seen(k, v, scope)
    visible = _visible(behind, scope)[:, None, None, :]
    out = _attention(q.view(num_seqs, kv_heads, -1, head_dim), k, v, visible, scope)
    return out.reshape(q.shape)


def _groups(
    counts: Sequence[int], lengths: Sequence[int], tables: Sequence[Sequence[int]], kv: Tensor
) -> list[Group | FirstChunk]:
    """Neighbours with one token each whose contexts differ by less than twice share a group; others are alone."""

    def key(i: int) -> tuple[int, int]:
        return (0, ((lengths[i] - 1) // kv.shape[3]).bit_length()) if counts[i] == 1 else (1, i)

    groups, start = list[Group | FirstChunk](), 0
    for _, members in groupby(range(len(counts)), key=key):
        which = list(members)
        count, ends = counts[which[0]], [lengths[i] for i in which]
        if len(which) == 1 and count == ends[0]:
            groups.append(FirstChunk(start, start + count))
        else:
            groups.append(make_group(start, count, [list(tables[i]) for i in which], ends, kv))
        start += count * len(which)
    return groups
