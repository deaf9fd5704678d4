"""When a request begins, of many that come at once.

Each of them passes through a dozen turns of the loop before its first token. Where all begin together, all are at the
same stage, and the first token of the first one comes shortly before that of the last. So a turn of the loop begins a
few of them, and the others wait: those that came first are over sooner, and the last one no later.

The same holds for sequences, of which one request may have many, and many may begin anew when a worker dies. A long
prompt takes milliseconds to be packed for a worker, and again to be hashed: those are begun one by one, and in between
as much time is left for others.
"""

from __future__ import annotations

import asyncio
from collections import deque

MOST = 16  # in one turn
LONG = 2048  # tokens
REST_S, REST_TOKEN_S = 5e-4, 1e-7  # and for each token: as long as it takes to be begun
REST_TURNS = 4


class Intake:
    """One event loop's."""

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


class SequenceTurns:
    """One event loop's."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._short = Intake()
        self._resting = False
        self._waiting: deque[tuple[asyncio.Future[None], int]] = deque()

    async def begin(self, num_tokens: int) -> None:
        """Return when a prompt of so many may be packed, or hashed; at once where few come and it is not long."""
        if num_tokens < LONG:
            await self._short.begin()
            return
        if not self._resting:
            self._rest(num_tokens)
            return
        turn = self._loop.create_future()
        self._waiting.append((turn, num_tokens))
        await turn

    def _rest(self, num_tokens: int) -> None:
        self._resting = True
        self._loop.call_later(REST_S + num_tokens * REST_TOKEN_S, self._pass, REST_TURNS)

    def _pass(self, turns: int) -> None:
        """On a busy machine the time may be over before others had any of it."""
        if turns:
            self._loop.call_soon(self._pass, turns - 1)
        else:
            self._next()

    def _next(self) -> None:
        self._resting = False
        while self._waiting and not self._resting:
            turn, num_tokens = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                self._rest(num_tokens)
