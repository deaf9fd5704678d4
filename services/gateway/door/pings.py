"""Pings of a stream: proxies and clients give up a stream that is silent for long.

begin ── HEAD_S, nothing sent ──> its head and `first` ──┐
  └── an event was sent ─────────────────────────────────┴──> a ping after each PING_S without an event
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from starlette.types import Send

# A failure within this time gets an HTTP status of its own, by which clients decide whether to try again.
HEAD_S = 1.0
# The same for a stream with events before its first token.
BEGIN_S = 0.1
# A silence lasts between one and two of these.
PING_S = 10.0


class Pings:
    """The pings of one stream: begin -> put_off ... -> end. One timer serves all of them."""

    def __init__(self, event: bytes, send: Send) -> None:
        self._event, self._send = event, send
        self._spoken = False
        self._first: Callable[[], Awaitable[None]] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._sent: asyncio.Task[None] | None = None

    def begin(self, after_s: float | None = None, first: Callable[[], Awaitable[None]] | None = None) -> None:
        """Start the timer. `first`: sends the first ping in another form."""
        self._stop()
        self._first = first
        self._wait(PING_S if after_s is None else after_s)

    def go_on(self) -> None:
        """Start the timer unless it runs. Call once the stream's head was sent."""
        self._first = None
        if self._timer is None:
            self._wait(PING_S)

    def put_off(self) -> None:
        """Postpone the next ping, as an event was sent."""
        self._spoken = True

    async def sent(self) -> None:
        """Wait for a ping that is being sent."""
        if self._sent is not None:
            await asyncio.wait({self._sent})

    async def end(self) -> None:
        """Stop pinging, and wait for a ping that is being sent."""
        self._stop()
        await self.sent()

    def abandon(self) -> None:
        """Stop pinging, as the client disconnected."""
        self._stop()
        if self._sent is not None:
            self._sent.cancel()

    def _wait(self, seconds: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(seconds, self._look)

    def _stop(self) -> None:
        """Stop, and break the reference cycle through the timer, which only the garbage collector would free."""
        self._first = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        first, self._first = self._first, None
        if not self._spoken and (self._sent is None or self._sent.done()):
            self._sent = asyncio.create_task(self._say(first))
        self._spoken = False
        self._wait(PING_S)

    async def _say(self, first: Callable[[], Awaitable[None]] | None) -> None:
        """Send a ping. A lost connection is left for the answer's next event to find."""
        try:
            if first is not None:
                await first()
            else:
                await self._send({"type": "http.response.body", "body": self._event, "more_body": True})
        except Exception:
            self._stop()
