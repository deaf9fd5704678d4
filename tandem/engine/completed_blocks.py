"""Prompt blocks that a step completes and pushes to a sink, layer after layer, while it computes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from torch import Tensor

from tandem.engine.scheduling import Scheduled, Sequence, WindowBlocks
from tandem.engine.types import KVSink


@dataclass(frozen=True, slots=True)
class CompletedBlocks:
    """The prompt blocks of one sequence that this step completes and pushes to the sequence's sink; of layers with a
    window, those from `first_near` on, at the places `near_ids`."""

    seq: Sequence
    sink: KVSink
    first_block: int
    block_ids: list[int]
    near_layers: frozenset[int] = frozenset()
    first_near: int = 0
    near_ids: list[int] = field(default_factory=list)

    def push_layer(self, layer: int, kv: Tensor) -> None:
        is_near = layer in self.near_layers
        if self.seq.error is None and (self.near_ids or not is_near):
            first, ids = (self.first_near, self.near_ids) if is_near else (self.first_block, self.block_ids)
            try:
                self.sink.push(layer, first, ids, kv)
            except Exception as error:
                self.seq.error = f"KV push failed: {type(error).__name__}: {error}"

    def done(self) -> None:
        self.seq.num_pushed_blocks = self.first_block + len(self.block_ids)


def completed_blocks(item: Scheduled, block_size: int, windows: WindowBlocks | None = None) -> CompletedBlocks | None:
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
    blocks = CompletedBlocks(seq, seq.sink, first, seq.block_table[first:complete])
    if windows is None:
        return blocks
    near = windows.windows.first_moved(first, -(-seq.num_prompt_tokens // block_size))
    ids = [windows.at[block] for block in seq.block_table[near:complete]]
    return replace(blocks, near_layers=windows.windows.layers, first_near=near, near_ids=ids)
