"""A request that waits for a model to start."""

from __future__ import annotations

import asyncio

from services.gateway.door.exchange import ClientLeft, Exchange
from tandem.registry import ModelStatus

# Seconds between comments that the model starts.
SAY_S = 1.0


class Waking:
    """Informs a client while its model starts: a stream by comments, and both kinds of answers by headers.

    The wait ends when the client disconnects."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._now = asyncio.get_running_loop().time
        self._began = self._said_at = self._now()

    async def tell(self, streamed: bool, status: ModelStatus) -> None:
        """Raises ClientLeft."""
        self._exchange.watch_left(after_s=0)
        if self._exchange.has_left:
            raise ClientLeft
        now = self._now()
        self._exchange.also["x-tandem-woken-after-s"] = f"{now - self._began:.1f}"
        if streamed and now >= self._said_at + SAY_S:
            self._said_at = now
            waits = f"; {status.reason}" if status.reason else ""
            await self._exchange.comment(f"{status.name} is {status.state}, about {status.left_s:.0f} s more{waits}")
