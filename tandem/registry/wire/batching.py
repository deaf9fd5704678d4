"""Calls in batches: what comes while one is under way waits and goes in the next.

    call 1    a ─────────> answers
    call 2       b ─────────> answers
                    c, d, e ┄┄> one call ─────────> answers
    idle      p ┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄> f, p: one call ─────────> answers

When idle there is no wait; when busy, each round trip is shared by all that would have waited for it anyway. The second
call keeps the server busy while the first one's answer is on its way. A patient call (p) starts none: it waits a
moment for another that takes it along.

A call that fails answers those that went with it. Where the registry has answered, each of them is asked once more
alone, so that one wrong argument is one caller's error. Where it has not, those who have waited for long fail too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from tandem.registry.errors import RegistryUnavailable, ScriptFailed

T = TypeVar("T")
CALLS_AT_ONCE = 2
# At 500 calls a second six of seven patient ones are taken along.
PATIENCE_S = 0.004
# Who has waited longer when a call is not answered would meet the same silence.
MAX_WAIT_S = 1.0


class PendingCall(NamedTuple, Generic[T]):
    argument: T
    answer: asyncio.Future[Any]
    since: float  # on the loop's clock


class CallBatcher(Generic[T]):
    """`run` takes the arguments of at most `most` calls, answers them in order, and is safe to repeat. `close` ends
    it."""

    def __init__(
        self, run: Callable[[Sequence[T]], Awaitable[Sequence[Any]]], most: int, patience_s: float = PATIENCE_S
    ) -> None:
        self._run = run
        self._most = most
        self._patience_s = patience_s
        self._waiting: list[PendingCall[T]] = []
        self._due = False  # what waits is to go with the next call
        self._tasks: set[asyncio.Task[None] | None] = set()
        self._patience: asyncio.Task[None] | None = None

    def call(self, argument: T, patient: bool = False) -> asyncio.Future[Any]:
        """Done with the answer to this argument, or what it has raised: RegistryUnavailable where the call that it went
        with, or one that it waited for, was not answered."""
        loop = asyncio.get_running_loop()
        waiting = PendingCall(argument, loop.create_future(), loop.time())
        self._waiting.append(waiting)
        if not patient:
            self._start()
        elif self._patience is None:
            self._patience = asyncio.create_task(self._start_later())
        return waiting.answer

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
        going: list[PendingCall[T]] = []
        try:
            while going := self._next():
                await self._answer(going)
        except BaseException as error:
            self._fail([*going, *self._waiting], error)
            self._waiting.clear()
            raise
        finally:
            self._tasks.discard(asyncio.current_task())

    async def _answer(self, going: Sequence[PendingCall[T]]) -> None:
        try:
            await self._ask(going)
        except RegistryUnavailable as error:
            late = asyncio.get_running_loop().time() - MAX_WAIT_S
            self._fail([*going, *(waiting for waiting in self._waiting if waiting.since <= late)], error)

    async def _ask(self, going: Sequence[PendingCall[T]]) -> None:
        try:
            answers = await self._run([waiting.argument for waiting in going])
        except Exception as error:
            if isinstance(error, RegistryUnavailable) and not isinstance(error, ScriptFailed):
                raise
            if len(going) == 1:
                self._fail(going, error)
                return
            for waiting in going:
                await self._ask([waiting])
        else:
            for waiting, answer in zip(going, answers, strict=True):
                if not waiting.answer.done():
                    waiting.answer.set_result(answer)

    def _next(self) -> list[PendingCall[T]]:
        """Those whose caller still waits; none where only patient ones do."""
        if not self._due:
            return []
        waiting = [entry for entry in self._waiting if not entry.answer.done()]
        going, self._waiting = waiting[: self._most], waiting[self._most :]
        self._due = bool(self._waiting)
        return going

    def _fail(self, entries: Sequence[PendingCall[T]], error: BaseException) -> None:
        for waiting in entries:
            if not waiting.answer.done():
                waiting.answer.set_exception(error) if isinstance(error, Exception) else waiting.answer.cancel()
