"""Attention over a paged KV cache: one small interface and its implementation in plain torch.

    planned   once a step: each sequence's tokens and blocks              ──> attends in each layer of that step
    fixed     once a shape: decode steps of that many sequences, whose    ──> attends in each layer of each such step
              lengths and tables lie at fixed addresses

In torch, for each group of sequences with equally many tokens: gather their blocks, mask later tokens, SDPA. A prompt's
first chunk does not read the cache: causal SDPA over its own k and v. `flashinfer` has the other implementation.
In float32 on a CPU a token's attention is the same, bit for bit, whatever else its step computes: `float32`'s kernels
compute it, or, where they cannot, `attention_alone`.

A layer's cache is (num_blocks, 2, num_kv_heads, block_size, row), with rows as kv_cache.py has them; or a view of some
heads of such a cache.
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

# Attention of one step, planned once for all layers: (q, k, v, a layer's cache, scope) ──> attention, in q's shape. q,
# k and v (tokens, heads, head_dim) are of the step's tokens; k and v are as the cache holds them. Forward makes of this
# the `Attend` of a model, which names the layer and knows no cache.
StepAttend: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor, Scope], Tensor]
# With fewer keys than KEYS_ALIKE, BLAS takes another kernel for a product; above some two hundred keys it splits a sum
# at places that depend on the number of keys.
KEYS_ALIKE, KEYS_AT_ONCE = 16, 128
PLAIN = Scope()


# The shape of a decode graph: its rows, one token of a sequence each, and the most blocks of a row's context.
Shape: TypeAlias = tuple[int, int]
MOST_ROWS = 256


class FixedAttend(Protocol):
    """Attention of decode steps that are replayed from static memory: no shape and no branch depends on the contents of
    that memory."""

    def prepare(self, lengths: Sequence[int], tables: Sequence[Sequence[int]]) -> None:
        """Writes the replay's contexts to the static memory; call before each replay.

        Unused rows attend to one token of the padding's block.
        """

    def __call__(self, q: Tensor, kv: Tensor, scope: Scope) -> Tensor:
        """Returns the attention of q (rows, heads, head_dim), one token each, over the cache `kv` of a layer."""


class PagedAttention(Protocol):
    gathered_layers: int  # layers' worth of KV that attention may copy at once

    def planned(self, counts: Sequence[int], lengths: Sequence[int], tables: Sequence[Sequence[int]]) -> StepAttend:
        """Plans a step in which sequence i has `counts[i]` tokens, the last of them token number `lengths[i]` of the
        context in the blocks `tables[i]`. The plan is valid until the next step is planned."""

    def shapes(self, rows: int, blocks: int, num_blocks: int) -> list[Shape]:
        """Returns the shapes of decode graphs that are worth their memory, for steps of up to `rows` rows whose
        contexts have up to `blocks` blocks each, over a cache of `num_blocks`."""

    def fixed(self, shape: Shape, padding_block: int) -> FixedAttend:
        """Returns the attention of decode steps of that shape; padding rows use the block `padding_block`."""


class TorchAttention:
    """PagedAttention in torch. `kv` is the cache of any layer, which gives the device and the caches' shape."""

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
        """Returns powers of two for rows and blocks: a graph gathers every block that its contexts may have, so shapes
        stop at twice the cache's blocks."""
        return [
            (size, width)
            for size in _powers(min(rows, MOST_ROWS))
            for width in _powers(blocks)
            if size * width <= 2 * num_blocks
        ]

    def fixed(self, shape: Shape, padding_block: int) -> FixedAttend:
        return TorchFixedAttend(shape, padding_block, self._kv.device)


class TorchFixedAttend:
    """Decode attention in torch that reads lengths and tables from static device memory."""

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
    """Returns the powers of two up to the first that is not below `most`."""
    return [1 << n for n in range((most - 1).bit_length() + 1)]


@dataclass(frozen=True, slots=True)
class Group:
    """Neighbouring sequences of a step with `query_len` tokens each: tokens `start` … `end` of the step's row.

    slabs (2, sequences, kv_heads, blocks): indices of the contexts' parts of the cache; a part is one head's K or V of
    one block. A sequence with fewer blocks repeats its first one.
    behind (sequences, 1, query_len, blocks * block_size): how many tokens a key is before a query; below 0, after it.
    last_block (sequences,): the index of the block in which the context ends.
    unwritten (sequences, 1, 1, block_size, 1): True for that block's slots after the context's end.
    """

    start: int
    end: int
    query_len: int
    slabs: Tensor
    behind: Tensor
    last_block: Tensor
    unwritten: Tensor


def make_group(start: int, query_len: int, tables: list[list[int]], lengths: list[int], kv: Tensor) -> Group:
    """Makes the group of sequences with contexts of `lengths` tokens, `query_len` new ones included, in `tables`.

    `start`: the group's first token in the step's row. `kv` is the cache of any layer.
    """
    kv_heads, block_size = kv.shape[2:4]
    width = max(-(-length // block_size) for length in lengths)
    blocks = torch.tensor([(table + [table[0]] * (width - len(table)))[:width] for table in tables])
    of_block, of_value = (kv.stride(dim) // kv.stride(2) for dim in (0, 1))
    slabs = blocks[None, :, None, :] * of_block + torch.arange(kv_heads).view(1, 1, kv_heads, 1)
    slabs = slabs + torch.tensor([0, of_value]).view(2, 1, 1, 1)
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
    """Tokens `start` … `end` of a step's row that are the first tokens of one sequence."""

    start: int
    end: int


def paged_attention(
    q: Tensor, k: Tensor, v: Tensor, kv: Tensor, groups: Sequence[Group | FirstChunk], scope: Scope, out: Tensor
) -> None:
    """Writes to `out` the attention of q (tokens, heads, head_dim), both of the same shape.

    Each Group attends to the cache `kv`, each FirstChunk to the step's own k and v.
    """
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
    """Returns True for each key that its query sees; `behind`: how many tokens the key is before the query."""
    return (behind >= 0) & (behind < scope.window) if scope.window else behind >= 0


def _grouped(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scope: Scope) -> Tensor:
    """Returns the attention of q (tokens, heads, head_dim), of sequences with equally many tokens, over the `visible`
    (sequences, 1, tokens of each, keys) keys of k, v (sequences, heads, keys, head_dim)."""
    k, v = _as_seen(k, v, scope)
    (num_seqs, kv_heads), query_len = k.shape[:2], visible.shape[2]
    # Make query heads that share a KV head rows of one product: (sequences, kv_heads, share * query_len, head_dim).
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
    """Returns the attention of query (sequences, kv_heads, rows, head_dim) over k, v (sequences, kv_heads, keys,
    head_dim)."""
    if is_exact(query) or not scope.is_plain:
        return attention_alone(query, k, v, visible, scope)
    return F.scaled_dot_product_attention(query, k, v, attn_mask=visible)


def attention_alone(query: Tensor, k: Tensor, v: Tensor, visible: Tensor, scope: Scope = PLAIN) -> Tensor:
    """Computes what SDPA does, but a row's result does not depend on other rows, invisible keys or other sequences.

    Products are padded to shapes for which BLAS takes the same kernel; sums over keys are too short for BLAS to split.
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
    """Returns the softmax of each row of `scores` (sequences, kv_heads, rows and padding, keys), counting sinks."""
    if sinks is None:
        return scores.softmax(dim=-1)
    # The sink goes into padding before the keys, so the keys keep their places within blocks of KEYS_ALIKE.
    beside = scores.new_full((*scores.shape[:3], KEYS_ALIKE), -math.inf)
    kv_heads = scores.shape[1]
    share = len(sinks) // kv_heads
    beside[:, :, :rows, 0] = sinks.float().view(kv_heads, share).repeat_interleave(rows // share, dim=1)
    beside[:, :, rows:, 0] = 0
    return torch.cat((beside, scores), dim=-1).softmax(dim=-1)[..., KEYS_ALIKE:]


def _gather(kv: Tensor, group: Group, dtype: torch.dtype) -> Tensor:
    """Gathers K and V of the group's contexts: (2, sequences, kv_heads, blocks * block_size, head_dim)."""
    block_size, row = kv.shape[3:]
    past = _slabs(kv).index_select(0, group.slabs.view(-1))
    past = opened(past.view(*group.slabs.shape, block_size, row), dtype)
    # A masked slot still counts as 0 * its contents, and another sequence may have left NaN there.
    rows = torch.arange(len(group.last_block), device=kv.device)
    ends = past[:, rows, :, group.last_block]  # (sequences, 2, kv_heads, block_size, head_dim)
    past[:, rows, :, group.last_block] = ends.masked_fill(group.unwritten, 0)
    return past.flatten(3, 4)


def _slabs(kv: Tensor) -> Tensor:
    """Views a layer's cache, whole or some of its heads, as (slabs, block_size * row): each block's K or V of a head,
    those of heads between them included."""
    size = kv.stride(2)
    last = sum((kv.shape[dim] - 1) * kv.stride(dim) for dim in range(3)) // size
    return kv.as_strided((last + 1, size), (size, 1))


def paged_decode(q: Tensor, kv: Tensor, tables: Tensor, lengths: Tensor, scope: Scope = PLAIN) -> Tensor:
    """Returns the attention of q (sequences, heads, head_dim), one token each, over `lengths` tokens in `tables`."""
    num_seqs, _, head_dim = q.shape
    _, _, kv_heads, block_size, _ = kv.shape
    past = opened(kv[tables], q.dtype).permute(2, 0, 3, 1, 4, 5)
    past = past.reshape(2, num_seqs, kv_heads, -1, past.shape[-1])
    behind = lengths[:, None] - 1 - torch.arange(tables.shape[1] * block_size, device=q.device)
    # A masked slot still counts as 0 * its contents, and another sequence may have left NaN there.
    k, v = past.masked_fill((behind < 0)[None, :, None, :, None], 0)
    k, v = _as_seen(k, v, scope)
    visible = _visible(behind, scope)[:, None, None, :]
    out = _attention(q.view(num_seqs, kv_heads, -1, head_dim), k, v, visible, scope)
    return out.reshape(q.shape)


def _groups(
    counts: Sequence[int], lengths: Sequence[int], tables: Sequence[Sequence[int]], kv: Tensor
) -> list[Group | FirstChunk]:
    """Groups a step's sequences: neighbours with one token each and contexts of similar length share a group; any
    other sequence is alone."""

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
