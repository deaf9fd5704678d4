"""One forward pass over the tokens a step has scheduled.

1 order    sequences with one token first, alike lengths together; each longer chunk is a group of its own
2 forward  all tokens lie in one row; each layer writes its K and V into the cache, then attends, then pushes the
           blocks that became complete to the sinks of their sequences
3 sample   logits only for the sequences whose last token was computed
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from tandem.engine.attention import FirstChunk, Group, make_group, paged_attention, write_kv
from tandem.engine.kernels import CpuKernels
from tandem.engine.models import Decoder
from tandem.engine.sampler import sample
from tandem.engine.scheduler import Scheduled
from tandem.engine.sequence import Sequence
from tandem.engine.types import KVSink, SampledToken


@dataclass(frozen=True, slots=True)
class Push:
    """Blocks of one sequence's prompt that this step completes."""

    seq: Sequence
    sink: KVSink
    first_block: int
    block_ids: list[int]

    def layer(self, layer: int, kv: Tensor) -> None:
        if self.seq.error is None:
            try:
                self.sink.push(layer, self.first_block, self.block_ids, kv)
            except Exception as error:
                self.seq.error = f"KV push failed: {type(error).__name__}: {error}"

    def done(self) -> None:
        self.seq.num_pushed_blocks = self.first_block + len(self.block_ids)


@dataclass(frozen=True, slots=True)
class Singles:
    """The contexts of a step's first tokens, which are all of their sequence that is computed; for `CpuKernels`."""

    tables: Tensor
    starts: Tensor
    lengths: Tensor


@dataclass(frozen=True, slots=True)
class PagedContext:
    """What a model's `attend` means in one step: `slots` (tokens,) are where each token's KV goes."""

    kv_cache: list[Tensor]
    slots: Tensor
    groups: list[Group | FirstChunk]
    pushes: list[Push]
    kernels: CpuKernels | None
    singles: Singles | None

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        kv = self.kv_cache[layer]
        write = write_kv if self.kernels is None else self.kernels.write_kv
        write(kv, self.slots, k, v)
        for push in self.pushes:
            push.layer(layer, kv)
        out = q.new_empty(q.shape)
        if self.kernels is not None and self.singles is not None:
            single = self.singles
            here = q[: len(single.lengths)]
            self.kernels.attention(here, kv, single.tables, single.starts, single.lengths, out)
        paged_attention(q, k, v, kv, self.groups, out)
        return out


class Runner:
    """Runs `model` over `kv_cache`, one tensor (num_blocks, 2, num_kv_heads, block_size, head_dim) per layer."""

    def __init__(self, model: Decoder, kv_cache: list[Tensor], kernels: CpuKernels | None = None) -> None:
        self._model, self._kv_cache, self._kernels = model, kv_cache, kernels
        self._block_size, self._device = kv_cache[0].shape[3], str(kv_cache[0].device)

    @torch.inference_mode()
    def execute(self, batch: list[Scheduled]) -> dict[str, SampledToken]:
        """Compute `batch`; returns the next token of every sequence that has nothing left to compute, by request id.

        A sequence that fails alone gets its `error` set.
        """
        if not batch:
            return {}
        batch = sorted(batch, key=self._group_key)
        context = self._context(batch)
        hidden = self._model(self._input_ids(batch), self._positions(batch), context)
        for push in context.pushes:
            push.done()
        return self._sample(batch, hidden)

    def _sample(self, batch: list[Scheduled], hidden: Tensor) -> dict[str, SampledToken]:
        ends, end = [], 0
        for item in batch:
            end += item.num_tokens
            if item.samples:
                ends.append(end - 1)
        seqs = [item.seq for item in batch if item.samples]
        if not seqs:
            return {}
        logits = self._model.logits(hidden[ends])
        for row in (~logits.amax(dim=-1).isfinite()).nonzero().flatten().tolist():
            seqs[row].error = "the model's logits are not finite numbers"
        return {seq.request_id: token for seq, token in zip(seqs, sample(logits, seqs), strict=True)}

    def _input_ids(self, batch: list[Scheduled]) -> Tensor:
        ids = array("q")
        for item in batch:
            start = item.seq.num_computed_tokens
            ids += item.seq.token_ids[start : start + item.num_tokens]
        return _tensor(ids).to(self._device)

    def _positions(self, batch: list[Scheduled]) -> Tensor:
        starts = [item.seq.num_computed_tokens for item in batch]
        positions = [p for s, item in zip(starts, batch, strict=True) for p in range(s, s + item.num_tokens)]
        return torch.tensor(positions, device=self._device)

    def _context(self, batch: list[Scheduled]) -> PagedContext:
        num_singles = sum(item.num_tokens == 1 for item in batch) if self._kernels is not None else 0
        groups, start = list[Group | FirstChunk](), num_singles
        for _, items in groupby(batch[num_singles:], key=self._group_key):
            groups.append(self._group(start, list(items)))
            start = groups[-1].end
        pushes = [push for item in batch if (push := self._push(item))]
        singles = self._singles(batch[:num_singles]) if num_singles else None
        return PagedContext(self._kv_cache, self._slots(batch), groups, pushes, self._kernels, singles)

    def _singles(self, items: list[Scheduled]) -> Singles:
        tables, starts = array("i"), array("q")
        for item in items:
            starts.append(len(tables))
            tables.extend(item.seq.block_table)
        lengths = array("q", [item.seq.num_computed_tokens + 1 for item in items])
        return Singles(torch.frombuffer(tables, dtype=torch.int32), *map(_tensor, (starts, lengths)))

    def _slots(self, batch: list[Scheduled]) -> Tensor:
        """Where each token's KV goes: block * block_size + offset."""
        size, slots = self._block_size, array("q")
        for item in batch:
            table, start = item.seq.block_table, item.seq.num_computed_tokens
            slots.extend(table[p // size] * size + p % size for p in range(start, start + item.num_tokens))
        return _tensor(slots).to(self._device)

    def _group(self, start: int, items: list[Scheduled]) -> Group | FirstChunk:
        if len(items) == 1 and items[0].seq.num_computed_tokens == 0:
            return FirstChunk(start, start + items[0].num_tokens)
        lengths = [item.seq.num_computed_tokens + item.num_tokens for item in items]
        tables = [item.seq.block_table for item in items]
        return make_group(start, items[0].num_tokens, tables, lengths, self._kv_cache[0])

    def _group_key(self, item: Scheduled) -> tuple[int, int, int]:
        """Single tokens whose contexts differ by less than twice share a group, so that little of it is padding."""
        if item.num_tokens > 1:
            return 1, *item.seq.key
        return 0, (item.seq.num_computed_tokens // self._block_size).bit_length(), 0

    def _push(self, item: Scheduled) -> Push | None:
        seq, end = item.seq, item.seq.num_computed_tokens + item.num_tokens
        if seq.sink is None:
            return None
        whole = end >= seq.num_prompt_tokens
        complete = -(-seq.num_prompt_tokens // self._block_size) if whole else end // self._block_size
        if complete <= seq.num_pushed_blocks:
            return None
        first = seq.num_pushed_blocks
        return Push(seq, seq.sink, first, seq.block_table[first:complete])


def _tensor(values: array[int]) -> Tensor:
    """The same memory as an int64 tensor."""
    return torch.frombuffer(values, dtype=torch.int64)
