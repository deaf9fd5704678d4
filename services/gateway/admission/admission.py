"""Waiting to be let into the cluster, and being inside.

    enter ──> it is this work's turn, and there is room ──> inside ── first token ──> read ── end ──> leave
         ├──> too many wait: the last of the tenant with most waiting is refused, this one or another
         ├──> the deadline passes
         └──> the gateway stops

With room to spare nothing waits and no task is made. `leave` is right at any time, so one `finally` releases
everything. The queue is looked at again when work leaves, when a prompt was read, and when workers come and go.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from services.gateway.admission.capacity import Admitted, Capacity
from services.gateway.admission.fair_queue import FairQueue, Work
from services.gateway.errors import GatewayError, Overloaded, TimedOut
from services.gateway.priority import PriorityClass
from tandem.registry import ClusterView

FOLLOW_S = 1.0


class Admission:
    """Owns who waits and who is inside. `run` follows the cluster's capacity."""

    def __init__(self, queue: FairQueue, max_queued: int) -> None:
        self.admitted = Admitted()
        self._queue = queue
        self._max_queued = max_queued
        # Done when it is let in, or with why not.
        self._turns: dict[Work, asyncio.Future[GatewayError | None]] = {}
        self._stopped: GatewayError | None = None

    def num_waiting(self, kind: PriorityClass) -> int:
        return self._queue.num_waiting(kind)

    async def enter(self, work: Work) -> None:
        """Return when `work` may go on. Whatever comes of it, `leave` follows.

        Raises:
            Overloaded: too many wait, and this is the one to go.
            TimedOut: the deadline came first.
            GatewayError: the error passed to `stop`.
        """
        if self._stopped:
            raise self._stopped
        turn = self._turns[work] = asyncio.get_running_loop().create_future()
        self._queue.push(work)
        self._let_in()
        if len(self._queue) > self._max_queued:
            self._refuse(self._queue.last(), self._full())
        if not turn.done():
            await _until(turn, work.deadline)
        if error := turn.result():
            raise error

    def wrote(self, work: Work, num_tokens: int) -> None:
        """So many new tokens of work that is inside."""
        if num_tokens and not work.new_tokens:
            self.admitted.read(work)
            self._let_in()
        work.new_tokens += num_tokens

    def leave(self, work: Work) -> None:
        """It has ended, well or not, inside or waiting; nothing happens where it is neither."""
        if work in self.admitted:
            self.admitted.leave(work)
            self._queue.correct(work)
        elif work in self._turns:
            self._withdraw(work)
        self._let_in()

    def resize(self, capacity: Capacity | None) -> None:
        self.admitted.capacity = capacity
        self._let_in()

    async def run(self, view: ClusterView, capacity: Callable[[], Capacity | None]) -> None:
        """Follow the view until cancelled."""
        while True:
            self.resize(capacity())
            await view.wait_changed(FOLLOW_S)

    def stop(self, error: GatewayError) -> None:
        """Nobody is let in any more; those that wait end with this error."""
        self._stopped = error
        for work in list(self._turns):
            self._refuse(work, error)

    def check_integrity(self) -> list[str]:
        """One line for each contradiction; none is what should be."""
        problems = self.admitted.check_integrity() + self._queue.check_integrity()
        if len(self._queue) != len(self._turns):
            problems.append(f"waiting: {len(self._queue)} in line, {len(self._turns)} with a turn to wait for")
        return problems

    # --- turns ---

    def _let_in(self) -> None:
        while (first := self._queue.first()) is not None and self.admitted.fits(first):
            self._queue.take()
            self.admitted.enter(first)
            self._turns.pop(first).set_result(None)

    def _refuse(self, work: Work, error: GatewayError) -> None:
        self._withdraw(work).set_result(error)

    def _withdraw(self, work: Work) -> asyncio.Future[GatewayError | None]:
        self._queue.remove(work)
        return self._turns.pop(work)

    def _full(self) -> Overloaded:
        return Overloaded(
            f"{self._max_queued} choices wait already, and this one's tenant has most of them", code="queue_full"
        )


async def _until(turn: asyncio.Future[GatewayError | None], deadline: float) -> None:
    try:
        async with asyncio.timeout_at(deadline):
            await asyncio.wait({turn})
    except TimeoutError:
        if not turn.done():
            raise TimedOut("the request's deadline passed while it waited for its turn", code="queue_timeout") from None
