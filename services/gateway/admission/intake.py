"""When each of many concurrent requests begins.

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

MOST = 16  # requests begun in one turn of the loop
LONG = 2048  # tokens
REST_S, REST_TOKEN_S = 5e-4, 1e-7  # seconds left for others, and for each token: about the time that beginning takes
REST_TURNS = 4


class Intake:
    """The intake of one event loop's requests."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._num_begun = 0  # in this turn of the loop
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def begin(self) -> None:
        """Wait for the request's turn, in the order of arrival; returns immediately if few arrive."""
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
    """The turns in which one event loop packs and hashes prompts."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._short = Intake()
        self._resting = False
        self._waiting: deque[tuple[asyncio.Future[None], int]] = deque()

    async def begin(self, num_tokens: int) -> None:
        """Wait until a prompt may be packed or hashed; returns immediately for short prompts if few arrive."""
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
        """Also yield a few turns of the loop: under load the timer may fire before other tasks have run."""
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
