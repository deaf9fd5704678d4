"""Failed releases, which are repeated until Redis answers."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import structlog

from tandem.registry.errors import RegistryUnavailable
from tandem.registry.wire.connection import RegistryConnection

log = structlog.get_logger(__name__)
# A release is repeated for at most this long; then the reservation is left to expire.
LIMIT_S = 60.0
RETRY_S = 0.5
CLOSE_WAIT_S = 1.0


class LateReleases:
    """Repeats failed releases, each in a task, until `close`."""

    def __init__(self, connection: RegistryConnection) -> None:
        self._connection = connection
        self._tasks: set[asyncio.Task[None]] = set()

    def add(self, script: str, *arguments: str) -> None:
        task = asyncio.create_task(self._retry(script, *arguments))
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    async def close(self) -> None:
        """Gives pending releases a moment to succeed, then cancels them."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CLOSE_WAIT_S)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _retry(self, script: str, *arguments: str) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(LIMIT_S):
                while True:
                    try:
                        await self._connection.call(script, *arguments)
                        return
                    except RegistryUnavailable:
                        await asyncio.sleep(RETRY_S)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            log.error("releasing a reservation failed", error=repr(error))
