"""A small model proposes what it would have drawn itself, with the same random numbers.

1 catch up   its KV of every token but the proposed ones: at first the whole prompt, wherever that was prefilled
2 draw       a token for each sequence, k times, each computed from the one before

Its KV lies in a cache of its own, in the blocks that the sequence has in the big model's: so nothing is allocated, and
a prompt that was prefilled before is found again as long as nobody else used its blocks.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

import torch
from torch import Tensor

from tandem.engine.forward import Chunk, Forward, step_input
from tandem.engine.sampling import Choose, draw
from tandem.engine.scheduling import Ahead, Row, Sequence
from tandem.engine.speculation.proposer import Wanted


class DraftProposer:
    """Proposes by `forward`, whose cache is `kv_cache`. Reads `max_tokens` tokens of prompts a step."""

    reads_first = True

    def __init__(self, forward: Forward, kv_cache: list[Tensor], choose: Choose, max_tokens: int) -> None:
        self._forward, self._choose, self._max_tokens = forward, choose, max_tokens
        self._block_size = kv_cache[0].shape[3]
        self._held: dict[int, bytes] = {}  # block -> name of the full block whose KV is there

    @torch.inference_mode()
    def propose(self, wanted: Items[Wanted]) -> bool:
        behind, going = self._catch_up(wanted)
        ahead = 0
        while going := [item for item in going if item.most > ahead and len(item.seq.proposed) == ahead]:
            chunks = [Chunk(seq, seq.num_drafted_tokens, seq.num_tokens + ahead) for seq, _ in going]
            self._compute(chunks)
            self._draw(chunks, ahead)
            ahead += 1
        return not behind

    def _catch_up(self, wanted: Items[Wanted]) -> tuple[bool, list[Wanted]]:
        """Reads what sequences are behind, as far as the budget goes; returns whether, and those behind no more."""
        left, chunks, ready = self._max_tokens, list[Chunk](), list[Wanted]()
        for item in wanted:
            seq = item.seq
            self._find(seq)
            start, end = seq.num_drafted_tokens, seq.num_tokens - 1
            if end - start <= 1:  # its last token and the one before are computed together
                ready.append(item)
            elif left:
                chunks.append(Chunk(seq, start, min(end, start + left)))
                left -= chunks[-1].end - start
                if chunks[-1].end == end:
                    ready.append(item)
        if chunks:
            self._compute(chunks)
        return bool(chunks), ready

    def _find(self, seq: Sequence) -> None:
        """A newcomer's prompt, in the blocks that it shares."""
        if seq.num_drafted_tokens == 0:
            names = seq.hashes.up_to(seq.token_ids, (seq.num_tokens - 1) // self._block_size)
            for block, name in zip(seq.block_table, names, strict=False):
                if self._held.get(block) != name:
                    break
                seq.num_drafted_tokens += self._block_size

    def _compute(self, chunks: list[Chunk]) -> None:
        self._hidden = self._forward(step_input(chunks, self._block_size))
        for seq, start, end in chunks:
            self._note(seq, start, end)
            seq.num_drafted_tokens = end

    def _note(self, seq: Sequence, start: int, end: int) -> None:
        """Notes which blocks hold the KV of which tokens now."""
        size, known = self._block_size, min(end, seq.num_tokens) // self._block_size
        for block in range(start // size, -(-end // size)):
            self._held.pop(seq.block_table[block], None)
        for block in range(start // size, known):
            self._held[seq.block_table[block]] = seq.hashes.link(seq.token_ids, block)[0]

    def _draw(self, chunks: list[Chunk], ahead: int) -> None:
        last, total = list[int](), 0
        for chunk in chunks:
            total += chunk.end - chunk.start
            last.append(total - 1)
        rows: list[Row] = [Ahead(chunk.seq, ahead) if ahead else chunk.seq for chunk in chunks]
        token_ids = draw(self._forward.logits(self._hidden, last), rows, self._choose)
        for chunk, token_id in zip(chunks, token_ids, strict=True):
            if token_id >= 0:
                chunk.seq.proposed.append(token_id)
