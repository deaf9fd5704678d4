"""Waiting for room: reservations that the block pool cannot hold yet, in order of priority, then of arrival.

Nothing is held while waiting and the first in line is never passed by, so a big request is not starved by small ones
and no cycle of waiting can form.
"""

from __future__ import annotations

import asyncio
import heapq
from itertools import count

from tandem.engine import Request
from tandem.worker import EnginePort


class Admission:
    def __init__(self, engine: EnginePort) -> None:
        self._engine = engine
        self._line: list[tuple[int, int, asyncio.Event]] = []
        self._arrivals = count()

    def __len__(self) -> int:
        return len(self._line)

    async def reserve(self, request: Request) -> tuple[int, list[int]]:
        """Take blocks for the whole sequence as soon as it is this one's turn and there is room.

        Returns:
            Prompt tokens that are cached here, and the physical ids of all the prompt's blocks in order.

        Raises:
            ValueError: it can never fit; names the field.
        """
        turn = (request.priority, next(self._arrivals), asyncio.Event())
        heapq.heappush(self._line, turn)
        try:
            while True:
                if self._line[0] is turn and (taken := await self._try(request)) is not None:
                    return taken
                await turn[2].wait()
                turn[2].clear()
        finally:
            self._line.remove(turn)
            heapq.heapify(self._line)
            self.look_again()

    def look_again(self) -> None:
        """Blocks may have become free: let the first in line look again."""
        if self._line:
            self._line[0][2].set()

    async def _try(self, request: Request) -> tuple[int, list[int]] | None:
        future = self._engine.submit(
            lambda engine: (
                None
                if (cached := engine.reserve(request)) is None
                else (cached, engine.landing_blocks(request.request_id))
            )
        )
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            self._engine.submit(lambda engine: engine.abort(request.request_id))
            raise
