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

from tandem.engine.attention import Group, make_group, paged_attention, write_kv
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
class PagedContext:
    """What a model's `attend` means in one step: `blocks` and `offsets` (tokens,) are where each token's KV goes."""

    kv_cache: list[Tensor]
    blocks: Tensor
    offsets: Tensor
    groups: list[Group]
    pushes: list[Push]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        kv = self.kv_cache[layer]
        write_kv(kv, self.blocks, self.offsets, k, v)
        for push in self.pushes:
            push.layer(layer, kv)
        return paged_attention(q, kv, self.groups)


class Runner:
    """Runs `model` over `kv_cache`, one tensor (num_blocks, 2, num_kv_heads, block_size, head_dim) per layer."""

    def __init__(self, model: Decoder, kv_cache: list[Tensor]) -> None:
        self._model, self._kv_cache = model, kv_cache
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
        return torch.frombuffer(ids, dtype=torch.int64).to(self._device)

    def _positions(self, batch: list[Scheduled]) -> Tensor:
        starts = [item.seq.num_computed_tokens for item in batch]
        positions = [p for s, item in zip(starts, batch, strict=True) for p in range(s, s + item.num_tokens)]
        return torch.tensor(positions, device=self._device)

    def _context(self, batch: list[Scheduled]) -> PagedContext:
        slots = [slot for item in batch for slot in self._slots(item)]
        blocks, offsets = torch.tensor(slots, device=self._device).unbind(dim=1)
        groups, start = [], 0
        for _, items in groupby(batch, key=self._group_key):
            groups.append(self._group(start, list(items)))
            start = groups[-1].end
        pushes = [push for item in batch if (push := self._push(item))]
        return PagedContext(self._kv_cache, blocks, offsets, groups, pushes)

    def _slots(self, item: Scheduled) -> list[tuple[int, int]]:
        size, table, start = self._block_size, item.seq.block_table, item.seq.num_computed_tokens
        return [(table[p // size], p % size) for p in range(start, start + item.num_tokens)]

    def _group(self, start: int, items: list[Scheduled]) -> Group:
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
