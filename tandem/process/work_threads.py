"""Threads for one kind of work that would hold up an event loop: much of it takes none from other kinds."""

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
    """At most `most` at once; what comes then waits. A caller that is cancelled before its turn leaves the queue."""

    def __init__(self, kind: str, most: int) -> None:
        self._executor, self._most = ThreadPoolExecutor(most, thread_name_prefix=kind), most

    def start(self) -> None:
        """Start all of them now. To start one when memory has run out may hold up the event loop for ever: Python waits
        there for a thread that died before it began."""
        everyone = Barrier(self._most)
        for _ in range(self._most):
            self._executor.submit(everyone.wait)

    def close(self) -> None:
        """Let what runs come to its end, and nothing else."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def run(self, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T]:
        return asyncio.get_running_loop().run_in_executor(self._executor, partial(fn, *args, **kwargs))
