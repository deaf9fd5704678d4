"""The forward pass: a step's tokens in, hidden states and logits out.

    StepInput ──> Forward ──> hidden states ──logits──> (rows, vocab_size)
                     └── written(layer): the layer's KV of these tokens lies in the cache

`TorchForward` runs a decoder with torch on any device; `kernels.CpuForward` runs the same in C.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from tandem.engine.device import sent
from tandem.engine.forward.attention import KEYS_AT_ONCE, PagedAttention, StepAttend, TorchAttention
from tandem.engine.kv import write_kv
from tandem.engine.lora import Adapter, RowAdapters, part_sizes
from tandem.engine.models import Decoder, Scope
from tandem.engine.scheduling import Sequence as TokenSequence
from tandem.engine.scheduling import WindowBlocks


@dataclass(frozen=True, slots=True)
class StepInput:
    """The input of a step: all its tokens in one row, sequence after sequence.

    `input_ids`, `positions` and `slots` (block * block_size + offset, where the KV goes) are (tokens,) int64; the ids
    are on the device if the host does not know them yet. Sequence i has `counts[i]` tokens; the last of them is token
    number `lengths[i]` of its context, whose KV lies in the blocks `tables[i]`. `adapters[i]`, if any, adapts them.
    `near`: where the KV of layers with a window lies, if their caches are sized for that.
    """

    input_ids: Tensor
    positions: Tensor
    slots: Tensor
    counts: Sequence[int]
    lengths: array[int]
    tables: Sequence[Sequence[int]]
    adapters: Sequence[Adapter | None] = ()
    near: Near | None = None


@dataclass(frozen=True, slots=True)
class Near:
    """Slots and tables of a step as StepInput has them, for the `layers` that have a window. Blocks that no token of
    the step sees are 0 in the tables."""

    layers: frozenset[int]
    slots: Tensor
    tables: Sequence[Sequence[int]]


class Chunk(NamedTuple):
    """Tokens `start` … `end` of a sequence, proposed ones included."""

    seq: TokenSequence
    start: int
    end: int


def step_input(
    chunks: Iterable[tuple[TokenSequence, int, int]], size: int, windows: WindowBlocks | None = None
) -> StepInput:
    """Makes the input of a step that computes `chunks`, (sequence, start, end) each, with blocks of `size` tokens.

    windows: the places of blocks in layers with a window, where these have caches of their own size.
    """
    chunks = tuple(chunks)
    ids, positions, slots, lengths = (array("q") for _ in range(4))
    counts, tables = list[int](), list[list[int]]()
    for seq, start, end in chunks:
        if end - start == 1 and start < len(seq.token_ids):
            ids.append(seq.token_ids[start])
            positions.append(start)
            slots.append(seq.block_table[start // size] * size + start % size)
        else:
            ids += seq.tokens_between(start, end)
            positions.extend(range(start, end))
            slots.extend(seq.block_table[p // size] * size + p % size for p in range(start, end))
        counts.append(end - start)
        lengths.append(end)
        tables.append(seq.block_table[: -(-end // size)])
    near = None if windows is None else _near(chunks, size, windows)
    return StepInput(_tensor(ids), _tensor(positions), _tensor(slots), counts, lengths, tables, near=near)


def _near(chunks: Sequence[tuple[TokenSequence, int, int]], size: int, windows: WindowBlocks) -> Near:
    slots, tables = array("q"), list[list[int]]()
    for seq, start, end in chunks:
        first, last = seq.window_start, -(-end // size)
        table = [0] * first + [windows.at[block] for block in seq.block_table[first:last]]
        slots.extend(table[p // size] * size + p % size for p in range(start, end))
        tables.append(table)
    return Near(windows.windows.layers, _tensor(slots), tables)


def _tensor(values: array[int]) -> Tensor:
    """Views the array's memory as an int64 tensor."""
    return torch.frombuffer(values, dtype=torch.int64) if values else torch.empty(0, dtype=torch.int64)


@dataclass(slots=True)
class Taps:
    """The inputs of the layers `at` in the last step: `rows[i]` (tokens, hidden_size) is the input of layer `at[i]`."""

    at: tuple[int, ...] = ()
    rows: list[Tensor] = field(default_factory=list)

    def enter(self, layer: int, x: Tensor) -> None:
        if layer in self.at:
            self.rows.append(x)


class Forward(Protocol):
    def __call__(self, step: StepInput, written: Callable[[int], None] | None = None) -> Tensor:
        """Returns the hidden states (tokens, hidden_size) after the last layer, valid until the next call.

        `written` is called with each layer's number when that layer's KV is in the cache.
        """

    def logits(self, hidden: Tensor, rows: Sequence[int]) -> Tensor:
        """Returns the logits (len(rows), vocab_size) float32 of `rows` of the hidden states, valid until the next
        call.
        """

    def normed(self, hidden: Tensor) -> Tensor:
        """Returns the hidden states after the last norm."""


class Observer(Protocol):
    def observe(self, chunks: Sequence[Chunk], hidden: Tensor) -> None:
        """Takes the states `hidden` (tokens, hidden_size) of the chunks, in order, after each step; valid until the
        next.
        """


class TorchForward:
    """Runs `model` over `kv_cache`, one tensor (num_blocks, 2, num_kv_heads, block_size, row) per layer.

    columns: the outputs that `model` has of linear layers of which it has only a part, by their names in a checkpoint.
    """

    def __init__(
        self, model: Decoder, kv_cache: list[Tensor], attention: PagedAttention | None = None, taps: Taps | None = None,
        columns: Mapping[str, slice] | None = None,
    ) -> None:  # fmt: skip
        self._model, self._kv_cache, self._taps, self._columns = model, kv_cache, taps or Taps(), columns or {}
        self._attention = attention or TorchAttention(kv_cache[0])

    def __call__(self, step: StepInput, written: Callable[[int], None] | None = None) -> Tensor:
        device = self._kv_cache[0].device
        paging = Paging(sent(step.slots, device), self._attention.planned(step.counts, step.lengths, step.tables))
        near, size = None, self._kv_cache[0].shape[3]
        if (its := step.near) is not None:
            near = Paging(sent(its.slots, device), self._attention.planned(step.counts, *_seen(step, its.tables, size)))
        context = PagedContext(self._kv_cache, paging, near, its.layers if its else frozenset(), written)
        self._taps.rows.clear()
        enter = self._taps.enter if self._taps.at else None
        ids, positions = sent(step.input_ids, device), sent(step.positions, device)
        return self._model(ids, positions, context, self._adapt(step), enter)

    def logits(self, hidden: Tensor, rows: Sequence[int]) -> Tensor:
        return self._model.logits(hidden[sent(torch.tensor(rows), hidden.device)])

    def normed(self, hidden: Tensor) -> Tensor:
        return self._model.normed(hidden)

    def _adapt(self, step: StepInput) -> RowAdapters | None:
        if not any(step.adapters):
            return None
        return RowAdapters(step.adapters, step.counts, part_sizes(self._model.config), self._columns)


def _seen(step: StepInput, tables: Sequence[Sequence[int]], size: int) -> tuple[Sequence[int], Sequence[Sequence[int]]]:
    """Cuts lengths and tables of a step's contexts to what layers with a window see, from a multiple of KEYS_AT_ONCE
    on, so that a token's sums are taken in the same parts whatever its step."""
    lengths, cut, each = list[int](), list[Sequence[int]](), math.lcm(KEYS_AT_ONCE, size) // size
    for length, table in zip(step.lengths, tables, strict=True):
        unseen = next((i for i, block in enumerate(table) if block), 0) // each * each
        lengths.append(length - unseen * size)
        cut.append(table[unseen:])
    return lengths, cut


class Paging(NamedTuple):
    """The slots (tokens,) of a step's tokens in a cache, and their attention to what is there."""

    slots: Tensor
    attend: StepAttend


@dataclass(frozen=True, slots=True)
class PagedContext:
    """The `attend` that a model gets in one step; it writes each token's KV to its slot, of `near_layers` as `near`
    says."""

    kv_cache: list[Tensor]
    paging: Paging
    near: Paging | None
    near_layers: frozenset[int]
    written: Callable[[int], None] | None

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scope: Scope) -> Tensor:
        kv = self.kv_cache[layer]
        slots, attend = self.near if self.near is not None and layer in self.near_layers else self.paging
        k, v = write_kv(kv, slots, k, v)
        if self.written is not None:
            self.written(layer)
        return attend(q, k, v, kv, scope)
