"""Calls in batches: calls that come while two batches are under way wait and share the next batch.

    call 1    a ─────────> answers
    call 2       b ─────────> answers
                    c, d, e ┄┄> one call ─────────> answers
    idle      p ┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄> f, p: one call ─────────> answers

When idle, no call waits; when busy, the calls that would have waited anyway share a round trip. The second batch keeps
the server busy while the first one's answer is on its way. A patient call (p) starts no batch: it waits a moment to
share the batch of another call.

If the registry answers a batch with an error, each of its calls is made once more alone, so that a wrong argument is
only its own caller's error. If the registry does not answer, all calls of the batch fail, and those that have waited
long.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from tandem.registry.errors import RegistryUnavailable, ScriptFailed

T = TypeVar("T")
CALLS_AT_ONCE = 2
# At 500 calls a second, six of seven patient calls share another call's batch within this time.
PATIENCE_S = 0.004
# When a batch is not answered, calls that have waited longer than this fail with it.
MAX_WAIT_S = 1.0


class PendingCall(NamedTuple, Generic[T]):
    argument: T
    answer: asyncio.Future[Any]
    since: float  # when the call was made, on the loop's clock


class CallBatcher(Generic[T]):
    """Makes batches of calls, until `close`.

    `run` takes the arguments of at most `most` calls and returns their answers in order; it must be safe to repeat.
    """

    def __init__(
        self, run: Callable[[Sequence[T]], Awaitable[Sequence[Any]]], most: int, patience_s: float = PATIENCE_S
    ) -> None:
        self._run = run
        self._most = most
        self._patience_s = patience_s
        self._waiting: list[PendingCall[T]] = []
        self._due = False  # the waiting calls go with the next batch
        self._tasks: set[asyncio.Task[None] | None] = set()
        self._patience: asyncio.Task[None] | None = None

    def call(self, argument: T, patient: bool = False) -> asyncio.Future[Any]:
        """Returns the future of the answer to this argument, or of its error: RegistryUnavailable if its batch, or one
        that it waited for, was not answered.
        """
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
        # A task that was cancelled before it began has answered no call.
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
        """Returns the calls of the next batch, without cancelled ones; none if only patient calls wait."""
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
