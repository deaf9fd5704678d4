"""Threads for one kind of work that would block an event loop. Each kind has its own threads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Barrier
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class WorkThreads:
    """A pool of `most` threads; further work waits. A caller that is cancelled before its turn leaves the queue."""

    def __init__(self, kind: str, most: int) -> None:
        self._executor, self._most = ThreadPoolExecutor(most, thread_name_prefix=kind), most

    def start(self) -> None:
        """Starts all threads now. To start a thread when memory has run out could block the event loop for ever: Python
        would wait for a thread that died before it began.
        """
        everyone = Barrier(self._most)
        for _ in range(self._most):
            self._executor.submit(everyone.wait)

    def close(self) -> None:
        """Lets running work finish, and drops waiting work."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def begin(self, fn: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
        """Runs what nobody waits for, also where there is no event loop."""
        self._executor.submit(fn, *args, **kwargs)

    def run(self, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T]:
        return asyncio.get_running_loop().run_in_executor(self._executor, partial(fn, *args, **kwargs))
