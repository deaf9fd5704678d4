"""Prompt blocks that a step completes and pushes to a sink, layer after layer, while it computes."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from tandem.engine.scheduling import Scheduled, Sequence
from tandem.engine.types import KVSink


@dataclass(frozen=True, slots=True)
class CompletedBlocks:
    """The prompt blocks of one sequence that this step completes and pushes to the sequence's sink."""

    seq: Sequence
    sink: KVSink
    first_block: int
    block_ids: list[int]

    def push_layer(self, layer: int, kv: Tensor) -> None:
        if self.seq.error is None:
            try:
                self.sink.push(layer, self.first_block, self.block_ids, kv)
            except Exception as error:
                self.seq.error = f"KV push failed: {type(error).__name__}: {error}"

    def done(self) -> None:
        self.seq.num_pushed_blocks = self.first_block + len(self.block_ids)


def completed_blocks(item: Scheduled, block_size: int) -> CompletedBlocks | None:
    """Returns the prompt blocks that `item` completes for its sequence's sink; None if it has no sink or no such
    block.
    """
    seq, end = item.seq, item.seq.num_computed_tokens + item.num_tokens
    if seq.sink is None:
        return None
    whole = end >= seq.num_prompt_tokens
    complete = -(-seq.num_prompt_tokens // block_size) if whole else end // block_size
    if complete <= seq.num_pushed_blocks:
        return None
    first = seq.num_pushed_blocks
    return CompletedBlocks(seq, seq.sink, first, seq.block_table[first:complete])
