"""Suspects on a worker: sequences that may have killed another worker. They run one at a time, of all gateways.

its turn ──> begins ──> computes alone, in steps of its own ──> is past the place of that death, or ended ──> the next
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from tandem.v1 import worker_pb2
from tandem.worker.errors import SequenceFailed

CHECK_S = 0.005


class SuspectTurns:
    """The turns of suspects, in order of arrival."""

    def __init__(self, num_suspects: Callable[[], int]) -> None:
        """`num_suspects`: returns the number of begun suspects that are not past the place of that death yet."""
        self._num_suspects = num_suspects
        self._beginning = asyncio.Lock()

    @asynccontextmanager
    async def turn(self, sequence: worker_pb2.SequenceSpec) -> AsyncIterator[None]:
        """Waits for a suspect's turn to begin and shortens its deadline by the wait; no wait for other sequences.

        Raises:
            SequenceFailed: its deadline passed while it waited.
        """
        if not sequence.alone_until:
            yield
            return
        now = asyncio.get_running_loop().time
        deadline = now() + sequence.timeout_ms / 1000
        late = SequenceFailed("DEADLINE_EXCEEDED", "the request's deadline passed before its turn as a suspect")
        try:
            async with asyncio.timeout_at(deadline):
                await self._beginning.acquire()
        except TimeoutError:
            raise late from None
        try:
            while self._num_suspects():
                if now() >= deadline:
                    raise late
                await asyncio.sleep(CHECK_S)
            sequence.timeout_ms = max(1, int((deadline - now()) * 1000))
            yield
        finally:
            self._beginning.release()
