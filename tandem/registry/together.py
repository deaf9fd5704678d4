"""Calls that go together: what comes while one is under way waits and goes in the next.

    a ─────────> answers
       b, c, d ┄┄┄┄┄┄┄┄┄> one call ─────────> answers

An idle line adds no wait; a busy one shares each round trip among all who would have waited for it anyway.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Together(Generic[T]):
    """`run` takes the arguments of at most `most` calls and answers them in order. `close` ends it."""

    def __init__(self, run: Callable[[Sequence[T]], Awaitable[Sequence[Any]]], most: int) -> None:
        self._run = run
        self._most = most
        self._waiting: list[tuple[T, asyncio.Future[Any]]] = []
        self._task: asyncio.Task[None] | None = None

    async def call(self, argument: T) -> Any:
        """The answer to this argument, or what the call that it went with, or the one before it, has raised."""
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.append((argument, answer))
        if self._task is None:
            self._task = asyncio.create_task(self._run_all())
        return await answer

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

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
            self._task = None

    def _next(self) -> list[tuple[T, asyncio.Future[Any]]]:
        """Those whose caller still waits."""
        self._waiting = [entry for entry in self._waiting if not entry[1].done()]
        going, self._waiting = self._waiting[: self._most], self._waiting[self._most :]
        return going

    def _fail(self, entries: list[tuple[T, asyncio.Future[Any]]], error: BaseException) -> None:
        for _, future in entries:
            if not future.done():
                future.set_exception(error) if isinstance(error, Exception) else future.cancel()
