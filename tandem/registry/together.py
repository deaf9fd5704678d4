"""Calls that go together: what comes while one is under way waits and goes in the next.

    line 1    a ─────────> answers
    line 2       b ─────────> answers
                    c, d, e ┄┄> one call ─────────> answers

An idle line adds no wait; busy ones share each round trip among all who would have waited for it anyway. The second
line keeps the server busy while the first one's answer is on its way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Generic, TypeVar

T = TypeVar("T")
LINES = 2


class Together(Generic[T]):
    """`run` takes the arguments of at most `most` calls and answers them in order. `close` ends it."""

    def __init__(self, run: Callable[[Sequence[T]], Awaitable[Sequence[Any]]], most: int) -> None:
        self._run = run
        self._most = most
        self._waiting: list[tuple[T, asyncio.Future[Any]]] = []
        self._tasks: set[asyncio.Task[None] | None] = set()

    async def call(self, argument: T) -> Any:
        """The answer to this argument, or what the call that it went with, or the one before it, has raised."""
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.append((argument, answer))
        if len(self._tasks) < LINES:
            self._tasks.add(asyncio.create_task(self._run_all()))
        return await answer

    async def close(self) -> None:
        tasks = [task for task in self._tasks if task]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        # A line cancelled before it began has told nobody.
        self._fail(self._waiting, asyncio.CancelledError())
        self._waiting.clear()

    async def _run_all(self) -> None:
        going: list[tuple[T, asyncio.Future[Any]]] = []
        try:
            while going := self._next():
                for (_, future), answer in zip(
                    going, await self._run([argument for argument, _ in going]), strict=True
                ):
                    if not future.done():
                        future.set_result(answer)
        except BaseException as error:
            # Whoever waits would only meet the same silence, later.
            self._fail([*going, *self._waiting], error)
            self._waiting.clear()
            if not isinstance(error, Exception):
                raise
        finally:
            self._tasks.discard(asyncio.current_task())

    def _next(self) -> list[tuple[T, asyncio.Future[Any]]]:
        """Those whose caller still waits."""
        self._waiting = [entry for entry in self._waiting if not entry[1].done()]
        going, self._waiting = self._waiting[: self._most], self._waiting[self._most :]
        return going

    def _fail(self, entries: list[tuple[T, asyncio.Future[Any]]], error: BaseException) -> None:
        for _, future in entries:
            if not future.done():
                future.set_exception(error) if isinstance(error, Exception) else future.cancel()
