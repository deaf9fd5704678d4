"""A step that a device computes while the host still handles the step before: its input tokens are on the device alone.

    host     launch t+1 | wait for t | tokens of t go out | launch t+2 | wait for t+1 | …
    device   ── t ──────────────────>├── t+1 ───────────────────────────────────────>├── t+2 ── …

A sequence that turns out to have ended with step t is in t+1 for nothing: its row is ignored, and the blocks that the
row writes to go to another sequence only after step t+1 is over.
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
    """A launched step, which draws one token for each of `chunks`, in their order.

    ids: the tokens on the device, 0 where no token could be drawn. read: waits for the tokens. tables: the sequences'
    block tables at the launch. reading: True while the step may still write to these blocks.
    """

    chunks: list[Chunk]
    tables: list[list[int]]
    ids: Tensor
    read: Callable[[], list[int]]
    reading: bool = True

    def going_on(self) -> list[Scheduled]:
        """Returns this step's sequences that still run, in the same blocks."""
        return [
            Scheduled(chunk.seq, 1, True)
            for chunk, table in zip(self.chunks, self.tables, strict=True)
            if chunk.seq.status is Status.RUNNING and chunk.seq.block_table is table
        ]

    def finish(self) -> dict[Sequence, int]:
        """Waits until the step is over and returns each sequence's token, -1 where no token could be drawn."""
        token_ids = self.read()
        self.reading = False
        return {chunk.seq: token_id for chunk, token_id in zip(self.chunks, token_ids, strict=True)}


def tokens_of(launched: Launched, batch: Iterable[Scheduled]) -> dict[str, list[SampledToken]]:
    """Waits for the tokens of `batch` and returns them by request id; sets `error` of a sequence without a token."""
    found, tokens = launched.finish(), dict[str, list[SampledToken]]()
    for item in batch:
        if (token_id := found[item.seq]) < 0:
            item.seq.error = NO_TOKEN
        else:
            tokens[item.seq.request_id] = [SampledToken(token_id)]
    return tokens
