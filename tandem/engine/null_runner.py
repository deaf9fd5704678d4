"""The null engine's runner: no weights and no model arithmetic, but KV bytes that can be checked, and step times.

1 attend   every sequence's KV so far must be what its tokens say, or the sequence ends with an error
2 layers   for each: sleep its share of the step's stated time, write the new tokens' KV, push the blocks completed
3 sample   the next token, from the KV of the last one, the seed and the token's index

A token's KV is one 64-bit digest of all tokens up to it, which differs by layer and by K or V; it is computed from the
KV of the token before. So the next step that reads a lost, mixed up, stale or damaged block finds it out, and equal
prompts give equal answers whichever worker prefills them. All other parts of the engine are the real ones. Sampling
supports temperature 0 and seeds; stop tokens are never drawn, so an answer has exactly max_tokens tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from hashlib import blake2b
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tandem.engine.completed_blocks import completed_blocks
from tandem.engine.kv import KVLayout
from tandem.engine.runner import accepted
from tandem.engine.scheduling import Ahead, Row, Scheduled, Sequence
from tandem.engine.step_time import StepTime
from tandem.engine.types import EngineConfig, SampledToken

Digests = NDArray[np.uint64]
Cells = tuple[NDArray[np.int64], slice, NDArray[np.int64]]
NO_DIGESTS: Digests = np.empty(0, np.uint64)


class TokenSlots(NamedTuple):
    """Cache slots of a sequence's tokens, in order, up to the end of this step: blocks and offsets, (tokens,) each."""

    blocks: NDArray[np.int64]
    offsets: NDArray[np.int64]

    def until(self, end: int) -> Cells:
        """Returns the index of the first `end` tokens' cells in a layer."""
        return self.blocks[:end], slice(None), self.offsets[:end]

    def since(self, start: int) -> Cells:
        return self.blocks[start:], slice(None), self.offsets[start:]


def null_layout(config: EngineConfig) -> KVLayout:
    """Returns a layout of 2 layers with 8 bytes of K and 8 of V a token; its hash equals no real model's."""
    if config.device != "cpu":
        raise ValueError(f"device: {config.device!r}, but the null engine's KV cache is in the CPU's memory")
    return KVLayout(
        model=config.model_name, revision=config.revision or "null", dtype="float32", num_layers=2, num_kv_heads=1,
        head_dim=2, block_size=config.block_size,
    )  # fmt: skip


class NullRunner:
    """Computes null steps over `kv_cache`, which has null_layout's layout. Calls `sleep` on the engine's thread."""

    def __init__(
        self, step_time: StepTime, kv_cache: list[Tensor], vocab_size: int, sleep: Callable[[float], None]
    ) -> None:
        self.overlaps = False
        self._step_time, self._kv_cache, self._vocab_size, self._sleep = step_time, kv_cache, vocab_size, sleep
        self._block_size = kv_cache[0].shape[3]
        self._cells = [_cells(kv) for kv in kv_cache]
        self._expected: WeakKeyDictionary[Sequence, Digests] = WeakKeyDictionary()

    def under_way(self) -> list[Scheduled]:
        """Returns no sequences: the null engine launches no step ahead, for no device computes beside the host."""
        return []

    def execute(self, batch: list[Scheduled], following: Items[Sequence] = ()) -> dict[str, list[SampledToken]]:
        """Sleeps for the step time of `batch`, checks and writes KV; returns tokens and sets errors as Runner does."""
        if not batch:
            return {}
        slots = [self._slots(item) for item in batch]
        for item, at in zip(batch, slots, strict=True):
            self._attend(item.seq, at)
        whole = [(item, at) for item, at in zip(batch, slots, strict=True) if item.seq.error is None]
        for (seq, num_tokens, _), _ in whole:
            end = min(seq.num_computed_tokens + num_tokens, seq.num_prompt_logprobs)
            seq.prompt_logprobs += map(_certain, seq.token_ids[len(seq.prompt_logprobs) + 1 : end + 1])
        self._run_layers(whole)
        return {item.seq.request_id: self._sample(item.seq) for item, _ in whole if item.samples}

    def _run_layers(self, whole: list[tuple[Scheduled, TokenSlots]]) -> None:
        completed = [blocks for item, _ in whole if (blocks := completed_blocks(item, self._block_size))]
        new = [(self._next_digests(item), at.since(item.seq.num_computed_tokens)) for item, at in whole]
        share = self._step_time.seconds(item.num_tokens for item, _ in whole) / len(self._cells)
        for layer, kv in enumerate(self._kv_cache):
            self._sleep(share)
            for digests, at in new:
                self._cells[layer][at] = _as_kv(digests, layer)
            for blocks in completed:
                blocks.push_layer(layer, kv)
        for blocks in completed:
            blocks.done()

    def _attend(self, seq: Sequence, slots: TokenSlots) -> None:
        length = seq.num_computed_tokens
        if length == 0:
            return
        expected, at = self._expected_of(seq, length), slots.until(length)
        for layer, cells in enumerate(self._cells):
            right = cells[at] == _as_kv(expected, layer)
            if not right.all():
                position = int(right.all(axis=1).argmin())
                seq.error = f"KV is damaged: position {position} of layer {layer} is not what the tokens say"
                return

    def _expected_of(self, seq: Sequence, length: int) -> Digests:
        """Returns the digests of the first `length` tokens; known tokens never change, so their digests are cached."""
        known = self._expected.get(seq, NO_DIGESTS)
        if len(known) < length:
            more = np.cumsum(_mix(seq, len(known), length))
            known = self._expected[seq] = np.concatenate((known, more + known[-1] if len(known) else more))
        return known[:length]

    def _next_digests(self, item: Scheduled) -> Digests:
        """Returns the digests of the tokens that this step computes, continued from the KV of the token before them."""
        seq, start = item.seq, item.seq.num_computed_tokens
        digests = np.cumsum(_mix(seq, start, start + item.num_tokens))
        return digests + self._digest(seq, start - 1) if start else digests

    def _digest(self, seq: Sequence, position: int) -> np.uint64:
        block, offset = divmod(position, self._block_size)
        digest: np.uint64 = self._cells[0][seq.block_table[block], 0, offset]
        return digest

    def _sample(self, seq: Sequence) -> list[SampledToken]:
        rows: list[Row] = [seq, *(Ahead(seq, count) for count in range(1, len(seq.proposed) + 1))]
        return accepted(seq.proposed, [(self._draw(seq, row), row) for row in rows])

    def _draw(self, seq: Sequence, row: Row) -> SampledToken:
        sampling, last = row.sampling, row.answer_start + row.num_output_tokens - 1
        seed = sampling.seed % 2**64 if sampling.temperature > 0 else 0
        numbers = int(self._digest(seq, last)), seed, row.num_output_tokens
        key = b"".join(number.to_bytes(8, "little") for number in numbers)
        first = int.from_bytes(blake2b(key, digest_size=8).digest(), "little")
        drawn = ((first + i) % self._vocab_size for i in range(self._vocab_size))
        token_id = next((t for t in drawn if t not in sampling.stop_token_ids), first % self._vocab_size)
        if sampling.logprobs is None:
            return SampledToken(token_id)
        return _certain(token_id)._replace(top=((token_id, 0.0),)[: sampling.logprobs])

    def _slots(self, item: Scheduled) -> TokenSlots:
        positions = np.arange(item.seq.num_computed_tokens + item.num_tokens)
        return TokenSlots(np.array(item.seq.block_table)[positions // self._block_size], positions % self._block_size)


def _certain(token_id: int) -> SampledToken:
    return SampledToken(token_id, 0.0, ((token_id, 0.0),), 1)


def _cells(kv: Tensor) -> Digests:
    """Views a layer's cache (num_blocks, 2, 1, block_size, 2) float32 as (num_blocks, 2, block_size) uint64."""
    return kv.view(torch.int64).numpy().view(np.uint64)[:, :, 0, :, 0]


def _as_kv(digests: Digests, layer: int) -> Digests:
    """Returns a layer's K and V (tokens, 2) of digests (tokens,); K of layer 0 is the digest itself."""
    return digests[:, None] + np.array([2 * layer, 2 * layer + 1], np.uint64)


def _mix(seq: Sequence, start: int, end: int) -> Digests:
    """Returns a pseudo-random number for each token and its position, by splitmix64's mixing."""
    x = np.array(seq.tokens_between(start, end), np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    x += np.arange(start, end, dtype=np.uint64) * np.uint64(0xD1B54A32D192ED03)
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
