"""Tasks that outlive their request, such as releasing what it held."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

import structlog

from tandem.registry import RegistryUnavailable

log = structlog.get_logger(__name__)


class BackgroundTasks:
    """Tasks that run to their end although their request has ended. `drain` waits for all."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Future[Any]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def __call__(self, work: Awaitable[Any]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    async def drain(self) -> None:
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _done(self, task: asyncio.Future[Any]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, RegistryUnavailable):
            log.warning("reservation not released yet", error=str(error))
        elif error is not None:
            log.error("freeing a request failed", exc_info=error)
