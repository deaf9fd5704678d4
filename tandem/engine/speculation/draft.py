"""Proposals by a small draft model: the tokens that it draws itself, with the same random numbers.

1 catch up   compute the draft's KV of all known tokens: at first the whole prompt, even if another worker prefilled it
2 draw       a token for each sequence, k times, each computed from the one before

The draft's KV lies in a cache of its own, in blocks of the same numbers as the sequence's in the big model's cache. So
no blocks are allocated, and a prompt that the draft prefilled before is found again until its blocks are reused.
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
    """Proposes by `forward`, whose cache is `kv_cache`. Catches up by at most `max_tokens` tokens a step."""

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
        """Computes KV that the draft lacks, up to the budget.

        Returns True if any was computed, and the sequences that have caught up.
        """
        left, chunks, ready = self._max_tokens, list[Chunk](), list[Wanted]()
        for item in wanted:
            seq = item.seq
            self._find(seq)
            start, end = seq.num_drafted_tokens, seq.num_tokens - 1
            if end - start <= 1:  # the last two tokens are computed together in `propose`
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
        """Counts the leading blocks of a new sequence whose KV the draft has already computed for other sequences."""
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
        """Records the names of full blocks whose KV the draft has now computed; forgets overwritten blocks."""
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
