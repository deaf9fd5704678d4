"""A step that a device computes while the host is at the one before: its input tokens are on the device alone.

    host     launch t+1 | wait for t | tokens of t go out | launch t+2 | wait for t+1 | …
    device   ── t ──────────────────>├── t+1 ───────────────────────────────────────>├── t+2 ── …

Whoever turns out to have ended with t is in t+1 for nothing: that row is not looked at, and the blocks that it writes
to are another's only once the step is over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import Tensor

from tandem.engine.forward import Chunk
from tandem.engine.sampling import NO_TOKEN
from tandem.engine.scheduling import Scheduled, Sequence, Status
from tandem.engine.types import SampledToken


@dataclass(eq=False, slots=True)
class Launched:
    """One token of each of `chunks`, in their order: `ids` on the device, 0 where there is none; `read` waits for them.

    tables: where each one's KV lay. reading: it may still write there.
    """

    chunks: list[Chunk]
    tables: list[list[int]]
    ids: Tensor
    read: Callable[[], list[int]]
    reading: bool = True

    def going_on(self) -> list[Scheduled]:
        """Its sequences that run still, in the same blocks."""
        return [
            Scheduled(chunk.seq, 1, True)
            for chunk, table in zip(self.chunks, self.tables, strict=True)
            if chunk.seq.status is Status.RUNNING and chunk.seq.block_table is table
        ]

    def finish(self) -> dict[Sequence, int]:
        """Waits until it is over; the token of each, -1 where there is none."""
        token_ids = self.read()
        self.reading = False
        return {chunk.seq: token_id for chunk, token_id in zip(self.chunks, token_ids, strict=True)}


def tokens_of(launched: Launched, batch: Iterable[Scheduled]) -> dict[str, list[SampledToken]]:
    """Waits for the tokens of those in `batch`, by request id; one that has none gets its `error` set."""
    found, tokens = launched.finish(), dict[str, list[SampledToken]]()
    for item in batch:
        if (token_id := found[item.seq]) < 0:
            item.seq.error = NO_TOKEN
        else:
            tokens[item.seq.request_id] = [SampledToken(token_id)]
    return tokens
