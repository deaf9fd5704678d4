"""One forward pass over the tokens a step has scheduled.

1 order    sequences with one token first, alike lengths together; then the longer chunks
2 forward  all tokens lie in one row; when a layer's K and V are in the cache, blocks that became complete are pushed to
           the sinks of their sequences
3 report   log-probabilities of the prompt's tokens, for sequences that want them
4 sample   logits only for the sequences whose last token was computed: of that token, and of proposed ones behind it
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import islice

import torch
from torch import Tensor

from tandem.engine.completed_blocks import completed_blocks
from tandem.engine.forward import Chunk, Forward, Observer, Prepare, StepInput, step_input
from tandem.engine.sampling import Choose, reported, sample
from tandem.engine.scheduling import Ahead, Row, Scheduled, Sequence
from tandem.engine.types import SampledToken

LOGITS_ROWS = 64  # of prompts, at once: a vocabulary is wide


class Runner:
    """Runs `forward` over `kv_cache`, one tensor (num_blocks, 2, num_kv_heads, block_size, row) per layer.

    `choose` makes tokens of logits. `prepare` is called while a device computes a step, with what the next one
    is likely to be; `observer` sees what each step has computed.
    """

    def __init__(
        self, forward: Forward, kv_cache: list[Tensor], choose: Choose, prepare: Prepare | None = None,
        observer: Observer | None = None,
    ) -> None:  # fmt: skip
        self._forward, self._kv_cache, self._choose, self._prepare = forward, kv_cache, choose, prepare
        self._observer = observer
        self._block_size = kv_cache[0].shape[3]
        self._foreseen: Foreseen | None = None

    @torch.inference_mode()
    def execute(self, batch: list[Scheduled]) -> dict[str, list[SampledToken]]:
        """Compute `batch`; returns the next tokens of every sequence that has nothing left to compute, by request id.

        A sequence that fails alone gets its `error` set.
        """
        if not batch:
            return {}
        batch = sorted(batch, key=self._order)
        pushing = (item for item in batch if item.seq.sink is not None)
        completed = [blocks for item in pushing if (blocks := completed_blocks(item, self._block_size))]

        def written(layer: int) -> None:
            for blocks in completed:
                blocks.push_layer(layer, self._kv_cache[layer])

        hidden = self._forward(self._input(batch), written if completed else None)
        for blocks in completed:
            blocks.done()
        if self._observer is not None:
            self._observer.observe(list(map(_chunk, batch)), hidden)
        self._look_ahead(batch)
        if any(item.seq.num_prompt_logprobs for item in batch):
            self._report_prompts(batch, hidden)
        return self._sample(batch, hidden)

    def _look_ahead(self, batch: list[Scheduled]) -> None:
        """Rows of a step in which each sequence writes one token: the next step, but for those that will have all
        they may write."""
        if self._prepare is None or any(item.num_tokens > 1 or not item.samples for item in batch):
            return
        staying = (item.seq for item in batch if item.seq.num_output_tokens + 1 < item.seq.sampling.max_tokens)
        chunks = [Chunk(seq, seq.num_computed_tokens + 1, seq.num_computed_tokens + 2) for seq in staying]
        if chunks and all(len(seq.block_table) * self._block_size >= end for seq, _, end in chunks):
            chunks.sort(key=lambda chunk: self._decode_order(chunk.seq, chunk.start))
            step = step_input(chunks, self._block_size)
            self._foreseen = Foreseen([(seq, start, seq.block_table) for seq, start, _ in chunks], step)
            self._prepare(step)

    def _report_prompts(self, batch: list[Scheduled], hidden: Tensor) -> None:
        row = 0
        for seq, num_tokens, _ in batch:
            # The row of a position is of the token behind it.
            first, to_row = len(seq.prompt_logprobs), row - seq.num_computed_tokens
            end = min(seq.num_computed_tokens + num_tokens, seq.num_prompt_logprobs)
            for start in range(first, end, LOGITS_ROWS):
                positions = range(start, min(start + LOGITS_ROWS, end))
                logits = self._forward.logits(hidden, [to_row + position for position in positions])
                token_ids = seq.token_ids[positions.start + 1 : positions.stop + 1]
                seq.prompt_logprobs += reported(logits, token_ids, seq.sampling.prompt_logprobs or 0)
            row += num_tokens

    def _sample(self, batch: list[Scheduled], hidden: Tensor) -> dict[str, list[SampledToken]]:
        rows, drawn, seqs = list[int](), list[Row](), list[Sequence]()
        end = 0
        for seq, num_tokens, samples in batch:
            end += num_tokens
            if samples:
                seqs.append(seq)
                drawn.append(seq)
                if seq.proposed:
                    rows.extend(range(end - 1 - len(seq.proposed), end - 1))
                    drawn.extend(Ahead(seq, count) for count in range(1, len(seq.proposed) + 1))
                rows.append(end - 1)
        if not rows:
            # The host waits for a device here, too: a step that still ran could write to blocks that an abort has
            # released and a transfer has filled since, and would seem to take no time.
            hidden[-1:, 0].tolist()
            return {}
        tokens = sample(self._forward.logits(hidden, rows), drawn, self._choose)
        if len(tokens) == len(seqs):
            return {seq.request_id: [token] for seq, token in zip(seqs, tokens, strict=True)}
        pairs = zip(tokens, drawn, strict=True)
        return {seq.request_id: accepted(seq.proposed, list(islice(pairs, 1 + len(seq.proposed)))) for seq in seqs}

    def _input(self, batch: list[Scheduled]) -> StepInput:
        foreseen, self._foreseen = self._foreseen, None
        if foreseen is not None and foreseen.has_come(batch):
            ids = torch.tensor([item.seq.token_ids[-1] for item in batch])
            step = replace(foreseen.step, input_ids=ids)
        else:
            chunks = ((seq, seq.num_computed_tokens, seq.num_computed_tokens + count) for seq, count, _ in batch)
            step = step_input(chunks, self._block_size)
        adapters = [item.seq.adapter for item in batch]
        return replace(step, adapters=adapters) if any(adapters) else step

    def _order(self, item: Scheduled) -> tuple[int, ...]:
        """Single tokens first, ones with contexts of about equal length side by side, and of them equal adapters."""
        if item.num_tokens > 1:
            return 1, *item.seq.key
        return self._decode_order(item.seq, item.seq.num_computed_tokens)

    def _decode_order(self, seq: Sequence, position: int) -> tuple[int, int, int]:
        return 0, (position // self._block_size).bit_length(), id(seq.adapter)


@dataclass(frozen=True, slots=True)
class Foreseen:
    """A step of one token each, but for its ids, written beside the one before. A block table only grows, until its
    sequence gets another one."""

    members: list[tuple[Sequence, int, list[int]]]
    step: StepInput

    def has_come(self, batch: list[Scheduled]) -> bool:
        return len(batch) == len(self.members) and all(
            item.seq is seq and item.num_tokens == 1 and seq.num_computed_tokens == start and seq.block_table is table
            for item, (seq, start, table) in zip(batch, self.members, strict=True)
        )


def _chunk(item: Scheduled) -> Chunk:
    start = item.seq.num_computed_tokens
    return Chunk(item.seq, start, start + item.num_tokens)


def accepted(proposed: Iterable[int], drawn: list[tuple[SampledToken, Row]]) -> list[SampledToken]:
    """The token after the known ones, and each one behind it that was drawn from what turned out right."""
    tokens = [drawn[0][0]]
    for guess, (token, row) in zip(proposed, drawn[1:], strict=True):
        if guess != tokens[-1].token_id or row.error is not None:
            break
        tokens.append(token)
    return tokens
