"""One forward pass over the tokens a step has scheduled.

1 order    sequences with one token first, alike lengths together; then the longer chunks
2 forward  all tokens lie in one row; when a layer's K and V are in the cache, blocks that became complete are pushed to
           the sinks of their sequences
3 sample   logits only for the sequences whose last token was computed
"""

from __future__ import annotations

from array import array
from itertools import accumulate

import torch
from torch import Tensor

from tandem.engine.forward import Forward, StepInput
from tandem.engine.push import push_of
from tandem.engine.sampler import Choose, sample
from tandem.engine.scheduler import Scheduled
from tandem.engine.types import SampledToken


class Runner:
    """Runs `forward` over `kv_cache`, one tensor (num_blocks, 2, num_kv_heads, block_size, head_dim) per layer.

    `choose` makes tokens of logits.
    """

    def __init__(self, forward: Forward, kv_cache: list[Tensor], choose: Choose) -> None:
        self._forward, self._kv_cache, self._choose = forward, kv_cache, choose
        self._block_size = kv_cache[0].shape[3]

    @torch.inference_mode()
    def execute(self, batch: list[Scheduled]) -> dict[str, SampledToken]:
        """Compute `batch`; returns the next token of every sequence that has nothing left to compute, by request id.

        A sequence that fails alone gets its `error` set.
        """
        if not batch:
            return {}
        batch = sorted(batch, key=self._order)
        pushes = [push for item in batch if (push := push_of(item, self._block_size))]

        def written(layer: int) -> None:
            for push in pushes:
                push.layer(layer, self._kv_cache[layer])

        hidden = self._forward(self._input(batch), written if pushes else None)
        for push in pushes:
            push.done()
        return self._sample(batch, hidden)

    def _sample(self, batch: list[Scheduled], hidden: Tensor) -> dict[str, SampledToken]:
        ends = accumulate(item.num_tokens for item in batch)
        rows = [end - 1 for item, end in zip(batch, ends, strict=True) if item.samples]
        seqs = [item.seq for item in batch if item.samples]
        if not seqs:
            return {}
        tokens = sample(self._forward.logits(hidden, rows), seqs, self._choose)
        return {seq.request_id: token for seq, token in zip(seqs, tokens, strict=True)}

    def _input(self, batch: list[Scheduled]) -> StepInput:
        ids, positions, slots, lengths = (array("q") for _ in range(4))
        size, tables = self._block_size, []
        for item in batch:
            seq, start = item.seq, item.seq.num_computed_tokens
            end = start + item.num_tokens
            if item.num_tokens == 1:
                ids.append(seq.token_ids[start])
                positions.append(start)
                slots.append(seq.block_table[start // size] * size + start % size)
            else:
                ids += seq.token_ids[start:end]
                positions.extend(range(start, end))
                slots.extend(seq.block_table[p // size] * size + p % size for p in range(start, end))
            lengths.append(end)
            tables.append(seq.block_table[: -(-end // size)])
        counts = [item.num_tokens for item in batch]
        return StepInput(_tensor(ids), _tensor(positions), _tensor(slots), counts, lengths, tables)

    def _order(self, item: Scheduled) -> tuple[int, ...]:
        """Single tokens first, ones with contexts of about equal length side by side."""
        if item.num_tokens > 1:
            return 1, *item.seq.key
        return 0, (item.seq.num_computed_tokens // self._block_size).bit_length()


def _tensor(values: array[int]) -> Tensor:
    """The same memory as an int64 tensor."""
    return torch.frombuffer(values, dtype=torch.int64)
