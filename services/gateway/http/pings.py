"""A stream that has been silent for long says that it is alive: proxies and clients give up others."""

from __future__ import annotations

import asyncio

from starlette.types import Send

PING_S = 15.0


class Pings:
    """begin -> put_off ... -> end. Without an event nothing is ever sent."""

    def __init__(self, event: bytes, send: Send) -> None:
        self._event, self._send = event, send
        self._spoken = False
        self._timer: asyncio.TimerHandle | None = None
        self._sent: asyncio.Task[None] | None = None

    def begin(self) -> None:
        if self._event:
            self._timer = asyncio.get_running_loop().call_later(PING_S, self._look)

    def put_off(self) -> None:
        """Something else was sent."""
        self._spoken = True

    async def end(self) -> None:
        """Nothing is sent any more once this returns."""
        self._stop()
        if self._sent is not None:
            await asyncio.wait({self._sent})

    def abandon(self) -> None:
        """Nobody is there to hear of it."""
        self._stop()
        if self._sent is not None:
            self._sent.cancel()

    def _stop(self) -> None:
        """Forgets the timer, which knows these pings: together they would be garbage that only a search finds."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        if not self._spoken and (self._sent is None or self._sent.done()):
            self._sent = asyncio.create_task(self._ping())
        self._spoken = False
        self.begin()

    async def _ping(self) -> None:
        """A connection that is gone is left for the answer's own next event to find."""
        try:
            await self._send({"type": "http.response.body", "body": self._event, "more_body": True})
        except Exception:
            self._stop()
