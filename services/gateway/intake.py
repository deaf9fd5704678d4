"""When a request begins, of many that come at once.

Each of them passes through a dozen turns of the loop before its first token. Where all begin together, all are at the
same stage, and the first token of the first one comes shortly before that of the last. So a turn of the loop begins a
few of them, and the others wait: those that came first are over sooner, and the last one no later. What takes long to
begin, for its prompt is long, counts as several.
"""

from __future__ import annotations

import asyncio
from collections import deque

MOST = 8  # in one turn
TOKENS = 2048  # of a prompt, which are packed or hashed in as much time as a request takes to begin


class Intake:
    """Of one event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._num_begun = 0  # in this turn
        self._waiting: deque[tuple[asyncio.Future[None], int]] = deque()

    async def begin(self, weight: int = 1) -> None:
        """Return when it is the request's turn, in the order of coming; at once where few come."""
        if self._num_begun < MOST and not self._waiting:
            self._count(weight)
            return
        turn = self._loop.create_future()
        self._waiting.append((turn, weight))
        await turn

    def _count(self, weight: int) -> None:
        if not self._num_begun:
            self._loop.call_soon(self._next)
        self._num_begun += weight

    def _next(self) -> None:
        self._num_begun = 0
        while self._waiting and self._num_begun < MOST:
            turn, weight = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                self._count(weight)


def weight_of(num_tokens: int) -> int:
    """0 where a prompt's length makes no difference."""
    return num_tokens // TOKENS
