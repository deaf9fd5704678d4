"""The forward pass: a step's tokens in, hidden states and logits out.

    StepInput ──> Forward ──> hidden states ──logits──> (rows, vocab_size)
                     └── written(layer): the layer's KV of these tokens lies in the cache

`TorchForward` runs a decoder with torch on any device; `kernels.CpuForward` runs the same in C.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from tandem.engine.device import sent
from tandem.engine.forward.attention import PagedAttention, StepAttend, TorchAttention
from tandem.engine.kv import write_kv
from tandem.engine.lora import Adapter, RowAdapters, part_sizes
from tandem.engine.models import Decoder, Scope
from tandem.engine.scheduling import Sequence as TokenSequence


@dataclass(frozen=True, slots=True)
class StepInput:
    """The input of a step: all its tokens in one row, sequence after sequence.

    `input_ids`, `positions` and `slots` (block * block_size + offset, where the KV goes) are (tokens,) int64; the ids
    are on the device if the host does not know them yet. Sequence i has `counts[i]` tokens; the last of them is token
    number `lengths[i]` of its context, whose KV lies in the blocks `tables[i]`. `adapters[i]`, if any, adapts them.
    """

    input_ids: Tensor
    positions: Tensor
    slots: Tensor
    counts: Sequence[int]
    lengths: array[int]
    tables: Sequence[Sequence[int]]
    adapters: Sequence[Adapter | None] = ()


class Chunk(NamedTuple):
    """Tokens `start` … `end` of a sequence, proposed ones included."""

    seq: TokenSequence
    start: int
    end: int


def step_input(chunks: Iterable[tuple[TokenSequence, int, int]], size: int) -> StepInput:
    """Makes the input of a step that computes `chunks`, (sequence, start, end) each, with blocks of `size` tokens."""
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
    return StepInput(_tensor(ids), _tensor(positions), _tensor(slots), counts, lengths, tables)


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
    """Runs `model` over `kv_cache`, one tensor (num_blocks, 2, num_kv_heads, block_size, row) per layer."""

    def __init__(
        self, model: Decoder, kv_cache: list[Tensor], attention: PagedAttention | None = None, taps: Taps | None = None
    ) -> None:
        self._model, self._kv_cache, self._taps = model, kv_cache, taps or Taps()
        self._attention = attention or TorchAttention(kv_cache[0])

    def __call__(self, step: StepInput, written: Callable[[int], None] | None = None) -> Tensor:
        device = self._kv_cache[0].device
        attend = self._attention.planned(step.counts, step.lengths, step.tables)
        context = PagedContext(self._kv_cache, sent(step.slots, device), attend, written)
        self._taps.rows.clear()
        enter = self._taps.enter if self._taps.at else None
        ids, positions = sent(step.input_ids, device), sent(step.positions, device)
        return self._model(ids, positions, context, self._adapt(step), enter)

    def logits(self, hidden: Tensor, rows: Sequence[int]) -> Tensor:
        return self._model.logits(hidden[sent(torch.tensor(rows), hidden.device)])

    def normed(self, hidden: Tensor) -> Tensor:
        return self._model.normed(hidden)

    def _adapt(self, step: StepInput) -> RowAdapters | None:
        return RowAdapters(step.adapters, step.counts, part_sizes(self._model.config)) if any(step.adapters) else None


@dataclass(frozen=True, slots=True)
class PagedContext:
    """The `attend` that a model gets in one step; it writes each token's KV to its slot of `slots` (tokens,)."""

    kv_cache: list[Tensor]
    slots: Tensor
    attend: StepAttend
    written: Callable[[int], None] | None

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scope: Scope) -> Tensor:
        kv = self.kv_cache[layer]
        k, v = write_kv(kv, self.slots, k, v)
        if self.written is not None:
            self.written(layer)
        return self.attend(q, k, v, kv, scope)
