"""The null engine's half of a step: no weights and no arithmetic of a model, but KV that means something, and time.

1 attend   every sequence's KV so far must be what its tokens say, or the sequence ends with an error
2 layers   for each: sleep its share of the step's stated time, write the new tokens' KV, push the blocks completed
3 sample   the next token, from the KV of the last one, the seed and the token's index

A token's KV is one 64-bit digest of all tokens up to it, told apart by layer and by K or V; it is computed from the KV
of the token before. So blocks that were lost, mixed up, stale or damaged are found by the next step to read them, and
equal prompts give equal answers whichever worker reads them. Everything else about an engine is the real one's.
Sampling knows temperature 0 and seeds; stop tokens are never drawn, so that an answer is as long as was asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tandem.engine.completed_blocks import completed_blocks
from tandem.engine.layout import KVLayout
from tandem.engine.runner import accepted
from tandem.engine.scheduler import Scheduled
from tandem.engine.sequence import Ahead, Row, Sequence
from tandem.engine.step_time import StepTime
from tandem.engine.types import EngineConfig, SampledToken

Digests = NDArray[np.uint64]


def null_layout(config: EngineConfig) -> KVLayout:
    """2 layers of 8 bytes of K and 8 of V a token: 32 bytes a token. No real model's blocks have this layout's hash."""
    if config.device != "cpu":
        raise ValueError(f"device: {config.device!r}, but the null engine's KV cache is in the CPU's memory")
    return KVLayout(
        model=config.model_name, revision=config.revision or "null", dtype="float32", num_layers=2, num_kv_heads=1,
        head_dim=2, block_size=config.block_size,
    )  # fmt: skip


class NullRunner:
    """Runs over `kv_cache`, whose layout is null_layout's. `sleep` is called on the engine's thread."""

    def __init__(
        self, step_time: StepTime, kv_cache: list[Tensor], vocab_size: int, sleep: Callable[[float], None]
    ) -> None:
        self._step_time, self._kv_cache, self._vocab_size, self._sleep = step_time, kv_cache, vocab_size, sleep
        self._block_size = kv_cache[0].shape[3]
        self._cells = [_cells(kv) for kv in kv_cache]

    def execute(self, batch: list[Scheduled]) -> dict[str, list[SampledToken]]:
        """Spend the time that computing `batch` takes; returns and sets errors as the model's runner does."""
        if not batch:
            return {}
        for item in batch:
            self._attend(item.seq)
        batch = [item for item in batch if item.seq.error is None]
        for seq, num_tokens, _ in batch:
            end = min(seq.num_computed_tokens + num_tokens, seq.num_prompt_logprobs)
            seq.prompt_logprobs += map(_certain, seq.token_ids[len(seq.prompt_logprobs) + 1 : end + 1])
        self._run_layers(batch, [self._next_digests(item) for item in batch])
        return {item.seq.request_id: self._sample(item.seq) for item in batch if item.samples}

    def _run_layers(self, batch: list[Scheduled], digests: list[Digests]) -> None:
        completed = [blocks for item in batch if (blocks := completed_blocks(item, self._block_size))]
        share = self._step_time.seconds(item.num_tokens for item in batch) / len(self._cells)
        for layer, kv in enumerate(self._kv_cache):
            self._sleep(share)
            for item, new in zip(batch, digests, strict=True):
                at = self._slots(item.seq, item.seq.num_computed_tokens, len(new))
                self._cells[layer][at] = _as_kv(new, layer)
            for blocks in completed:
                blocks.push_layer(layer, kv)
        for blocks in completed:
            blocks.done()

    def _attend(self, seq: Sequence) -> None:
        length = seq.num_computed_tokens
        if length == 0:
            return
        expected, at = np.cumsum(_mix(seq, 0, length)), self._slots(seq, 0, length)
        for layer, cells in enumerate(self._cells):
            wrong = (cells[at] != _as_kv(expected, layer)).any(axis=1)
            if wrong.any():
                position = int(wrong.argmax())
                seq.error = f"KV is damaged: position {position} of layer {layer} is not what the tokens say"
                return

    def _next_digests(self, item: Scheduled) -> Digests:
        """Those of the tokens that this step computes, on from the KV of the one before them."""
        seq, start = item.seq, item.seq.num_computed_tokens
        digests = np.cumsum(_mix(seq, start, start + item.num_tokens))
        return digests + self._cells[0][self._slots(seq, start - 1, 1)][:, 0] if start else digests

    def _sample(self, seq: Sequence) -> list[SampledToken]:
        rows: list[Row] = [seq, *(Ahead(seq, count) for count in range(1, len(seq.proposed) + 1))]
        return accepted(seq.proposed, [(self._draw(seq, row), row) for row in rows])

    def _draw(self, seq: Sequence, row: Row) -> SampledToken:
        sampling, last = row.sampling, row.answer_start + row.num_output_tokens - 1
        digest = self._cells[0][self._slots(seq, last, 1)][0, 0]
        seed = sampling.seed % 2**64 if sampling.temperature > 0 else 0
        key = digest.tobytes() + seed.to_bytes(8, "little") + row.num_output_tokens.to_bytes(8, "little")
        first = int.from_bytes(blake2b(key, digest_size=8).digest(), "little")
        drawn = ((first + i) % self._vocab_size for i in range(self._vocab_size))
        token_id = next((t for t in drawn if t not in sampling.stop_token_ids), first % self._vocab_size)
        if sampling.logprobs is None:
            return SampledToken(token_id)
        return _certain(token_id)._replace(top=((token_id, 0.0),)[: sampling.logprobs])

    def _slots(self, seq: Sequence, start: int, count: int) -> tuple[NDArray[np.int64], slice, NDArray[np.int64]]:
        """Where the KV of `count` tokens from `start` on lies: an index into a layer's cells."""
        first = start // self._block_size
        blocks = np.array(seq.block_table[first : -(-(start + count) // self._block_size)])
        positions = np.arange(start, start + count)
        return blocks[positions // self._block_size - first], slice(None), positions % self._block_size


def _certain(token_id: int) -> SampledToken:
    return SampledToken(token_id, 0.0, ((token_id, 0.0),), 1)


def _cells(kv: Tensor) -> Digests:
    """A layer's cache (num_blocks, 2, 1, block_size, 2) float32 as (num_blocks, 2, block_size) uint64, same memory."""
    return kv.view(torch.int64).numpy().view(np.uint64)[:, :, 0, :, 0]


def _as_kv(digests: Digests, layer: int) -> Digests:
    """(tokens,) -> K and V (tokens, 2) of a layer; K of layer 0 is the digest itself."""
    return digests[:, None] + np.array([2 * layer, 2 * layer + 1], np.uint64)


def _mix(seq: Sequence, start: int, end: int) -> Digests:
    """A number for each token and its position, by splitmix64's mixing."""
    x = np.array(seq.tokens_between(start, end), np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    x += np.arange(start, end, dtype=np.uint64) * np.uint64(0xD1B54A32D192ED03)
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
