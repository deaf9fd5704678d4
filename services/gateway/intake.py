"""When a request begins, of many that come at once.

Each of them passes through a dozen turns of the loop before its first token. Where all begin together, all are at the
same stage, and the first token of the first one comes shortly before that of the last. So a turn of the loop begins a
few of them, and the others wait: those that came first are over sooner, and the last one no later.
"""

from __future__ import annotations

import asyncio
from collections import deque

MOST = 8  # in one turn


class Intake:
    """Of one event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._num_begun = 0  # in this turn
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def begin(self) -> None:
        """Return when it is the request's turn, in the order of coming; at once where few come."""
        if self._num_begun < MOST and not self._waiting:
            self._count()
            return
        turn = self._loop.create_future()
        self._waiting.append(turn)
        await turn

    def _count(self) -> None:
        if not self._num_begun:
            self._loop.call_soon(self._next)
        self._num_begun += 1

    def _next(self) -> None:
        self._num_begun = 0
        while self._waiting and self._num_begun < MOST:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                self._count()
