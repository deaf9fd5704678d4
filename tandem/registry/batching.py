"""Calls in batches: what comes while one is under way waits and goes in the next.

    call 1    a ─────────> answers
    call 2       b ─────────> answers
                    c, d, e ┄┄> one call ─────────> answers
    idle      p ┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄> f, p: one call ─────────> answers

When idle there is no wait; when busy, each round trip is shared by all that would have waited for it anyway. The second
call keeps the server busy while the first one's answer is on its way. A patient call (p) starts none: it waits a
moment for another that takes it along.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Generic, TypeVar

T = TypeVar("T")
CALLS_AT_ONCE = 2
# At 500 calls a second six of seven patient ones are taken along.
PATIENCE_S = 0.004


class CallBatcher(Generic[T]):
    """`run` takes the arguments of at most `most` calls and answers them in order. `close` ends it."""

    def __init__(
        self, run: Callable[[Sequence[T]], Awaitable[Sequence[Any]]], most: int, patience_s: float = PATIENCE_S
    ) -> None:
        self._run = run
        self._most = most
        self._patience_s = patience_s
        self._waiting: list[tuple[T, asyncio.Future[Any]]] = []
        self._due = False  # what waits is to go with the next call
        self._tasks: set[asyncio.Task[None] | None] = set()
        self._patience: asyncio.Task[None] | None = None

    async def call(self, argument: T, patient: bool = False) -> Any:
        """The answer to this argument, or what the call that it went with, or the one before it, has raised."""
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.append((argument, answer))
        if not patient:
            self._start()
        elif self._patience is None:
            self._patience = asyncio.create_task(self._start_later())
        return await answer

    async def close(self) -> None:
        tasks = [task for task in (*self._tasks, self._patience) if task]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        # A task cancelled before it began has answered nobody.
        self._fail(self._waiting, asyncio.CancelledError())
        self._waiting.clear()

    def _start(self) -> None:
        self._due = True
        if len(self._tasks) < CALLS_AT_ONCE:
            self._tasks.add(asyncio.create_task(self._run_all()))

    async def _start_later(self) -> None:
        await asyncio.sleep(self._patience_s)
        self._patience = None
        if self._waiting:
            self._start()

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
            # Those that wait would only meet the same silence, later.
            self._fail([*going, *self._waiting], error)
            self._waiting.clear()
            if not isinstance(error, Exception):
                raise
        finally:
            self._tasks.discard(asyncio.current_task())

    def _next(self) -> list[tuple[T, asyncio.Future[Any]]]:
        """Those whose caller still waits; none where only patient ones do."""
        if not self._due:
            return []
        waiting = [entry for entry in self._waiting if not entry[1].done()]
        going, self._waiting = waiting[: self._most], waiting[self._most :]
        self._due = bool(self._waiting)
        return going

    def _fail(self, entries: list[tuple[T, asyncio.Future[Any]]], error: BaseException) -> None:
        for _, future in entries:
            if not future.done():
                future.set_exception(error) if isinstance(error, Exception) else future.cancel()
