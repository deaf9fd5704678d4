"""Computing a scheduled step: a forward pass over its tokens, and sampling.

1 order    sequences with one token first, similar lengths together; then the longer chunks
2 forward  all tokens lie in one row; when a layer's K and V are in the cache, blocks that became complete are pushed to
           the sinks of their sequences
3 report   log-probabilities of the prompt's tokens, for sequences that want them
4 sample   logits only for the sequences whose last token was computed: of that token, and of proposed ones after it
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import replace
from itertools import islice

import torch
from torch import Tensor

from tandem.engine.completed_blocks import completed_blocks
from tandem.engine.device import fetched, sent
from tandem.engine.forward import Chunk, Forward, Observer, StepInput, step_input
from tandem.engine.launched import Launched, tokens_of
from tandem.engine.pooling import StatePooling
from tandem.engine.sampling import Choose, chosen, reported, sample
from tandem.engine.scheduling import Ahead, Row, Scheduled, Sequence, WindowBlocks
from tandem.engine.types import SampledToken

LOGITS_ROWS = 64  # prompt rows whose logits are computed at once: each row is as wide as the vocabulary


class Runner:
    """Runs `forward` over `kv_cache`, one tensor (num_blocks, 2, num_kv_heads, block_size, row) per layer.

    `choose` turns logits into tokens; `observer` sees each step's hidden states. `overlaps`: a device computes, so
    the next step is launched before the tokens of the current step are known.
    """

    def __init__(
        self, forward: Forward, kv_cache: list[Tensor], choose: Choose, observer: Observer | None = None,
        *, overlaps: bool = False, windows: WindowBlocks | None = None,
    ) -> None:  # fmt: skip
        self._forward, self._kv_cache, self._choose, self._observer = forward, kv_cache, choose, observer
        self.overlaps, self._windows = overlaps and observer is None, windows
        self._block_size = kv_cache[0].shape[3]
        self._launched: Launched | None = None

    @torch.inference_mode()
    def execute(self, batch: list[Scheduled], following: Items[Sequence] = ()) -> dict[str, list[SampledToken]]:
        """Computes `batch` and returns, by request id, the next tokens of every sequence with nothing left to compute.

        A sequence that fails alone gets its `error` set. `following` are sequences that surely decode in the next step
        too: if there are any, that step is launched before waiting for this step's tokens.
        """
        if not batch:
            return {}
        launched, self._launched = self._launched, None
        if launched is None and not following:
            return self._execute(batch)
        if launched is None:
            chunks = list(map(_chunk, sorted(batch, key=self._order)))
            launched = self._launch(chunks, None, [chunk.seq for chunk in chunks])
        if following:
            self._launched = self._launch_behind(launched, following)
        return tokens_of(launched, batch)

    def _execute(self, batch: list[Scheduled]) -> dict[str, list[SampledToken]]:
        batch = sorted(batch, key=self._order)
        pushing = (item for item in batch if item.seq.sink is not None)
        completed = [blocks for item in pushing if (blocks := completed_blocks(item, self._block_size, self._windows))]

        def written(layer: int) -> None:
            for blocks in completed:
                blocks.push_layer(layer, self._kv_cache[layer])

        hidden = self._forward(self._input(batch), written if completed else None)
        for blocks in completed:
            blocks.done()
        if self._observer is not None:
            self._observer.observe(list(map(_chunk, batch)), hidden)
        if any(item.seq.pool for item in batch):
            self._pool(batch, hidden)
        if any(item.seq.num_prompt_logprobs for item in batch):
            self._report_prompts(batch, hidden)
        return self._sample(batch, hidden)

    def under_way(self) -> list[Scheduled]:
        """Returns the sequences still alive in the step launched ahead; if none is, waits for the step and drops it."""
        batch = self._launched.going_on() if self._launched is not None else []
        if self._launched is not None and not batch:
            self._launched.finish()
            self._launched = None
        return batch

    def _launch(self, chunks: list[Chunk], ids: Tensor | None, rows: list[Row]) -> Launched:
        """Launches a step of one token for each of `chunks` without waiting for the drawn tokens.

        ids: the step's input tokens, where only the device has them.
        """
        step = step_input(chunks, self._block_size, self._windows)
        adapters = [chunk.seq.adapter for chunk in chunks]
        step = replace(
            step, input_ids=step.input_ids if ids is None else ids, adapters=adapters if any(adapters) else ()
        )
        logits = self._forward.logits(self._forward(step), range(len(chunks)))
        token_ids = chosen(logits, rows)
        tables = [chunk.seq.block_table for chunk in chunks]
        launched = Launched(chunks, tables, token_ids.clamp(min=0), fetched(token_ids))
        for chunk in chunks:
            chunk.seq.under_way = launched
        return launched

    def _launch_behind(self, step: Launched, following: Items[Sequence]) -> Launched:
        """Launches the step after `step` for its sequences `following`; their input is the tokens that `step` draws."""
        places = {chunk.seq: place for place, chunk in enumerate(step.chunks)}
        kept = [places[seq] for seq in following]
        kept.sort()
        ahead = (step.chunks[place] for place in kept)
        chunks = [Chunk(seq, start + 1, end + 1) for seq, start, end in ahead]
        ids = step.ids if len(kept) == len(step.chunks) else step.ids[sent(torch.tensor(kept), step.ids.device)]
        return self._launch(chunks, ids, [Ahead(chunk.seq, 1) for chunk in chunks])

    def _pool(self, batch: list[Scheduled], hidden: Tensor) -> None:
        row = 0
        for seq, num_tokens, _ in batch:
            if isinstance(seq.pool, StatePooling):
                seq.pool.take(seq.num_computed_tokens, hidden[row : row + num_tokens], self._forward.normed)
            row += num_tokens

    def _report_prompts(self, batch: list[Scheduled], hidden: Tensor) -> None:
        row = 0
        for seq, num_tokens, _ in batch:
            # The logits at a position predict the token after it.
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
            # The host waits for the device here too. Otherwise the running step could write to blocks that an abort has
            # released and a transfer has filled meanwhile, and its measured time would be close to 0.
            hidden[-1:, 0].tolist()
            return {}
        tokens = sample(self._forward.logits(hidden, rows), drawn, self._choose)
        if len(tokens) == len(seqs):
            return {seq.request_id: [token] for seq, token in zip(seqs, tokens, strict=True)}
        pairs = zip(tokens, drawn, strict=True)
        return {seq.request_id: accepted(seq.proposed, list(islice(pairs, 1 + len(seq.proposed)))) for seq in seqs}

    def _input(self, batch: list[Scheduled]) -> StepInput:
        chunks = ((seq, seq.num_computed_tokens, seq.num_computed_tokens + count) for seq, count, _ in batch)
        step = step_input(chunks, self._block_size, self._windows)
        adapters = [item.seq.adapter for item in batch]
        return replace(step, adapters=adapters) if any(adapters) else step

    def _order(self, item: Scheduled) -> tuple[int, ...]:
        """Returns the sort key: single tokens first, by about equal context length, then by adapter; then longer
        chunks.
        """
        if item.num_tokens > 1:
            return 1, *item.seq.key
        seq = item.seq
        return 0, (seq.num_computed_tokens // self._block_size).bit_length(), id(seq.adapter)


def _chunk(item: Scheduled) -> Chunk:
    start = item.seq.num_computed_tokens
    return Chunk(item.seq, start, start + item.num_tokens)


def accepted(proposed: Iterable[int], drawn: list[tuple[SampledToken, Row]]) -> list[SampledToken]:
    """Returns the first drawn token and every further one whose preceding proposals all equal the drawn tokens."""
    tokens = [drawn[0][0]]
    for guess, (token, row) in zip(proposed, drawn[1:], strict=True):
        if guess != tokens[-1].token_id or row.error is not None:
            break
        tokens.append(token)
    return tokens
