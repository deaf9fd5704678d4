"""Admission: waiting to enter the cluster, and being inside.

    check ──> refused at once, before its prompt is tokenized
    enter ──> it is this work's turn, and there is room ──> inside ── first token ──> prefilled ── end ──> leave
         ├──> it would come too late: refused at once (forecast.py), where its request named a deadline or a target to
         │    the first token is set, by it or by --classes; nobody else is
         ├──> too many wait: the last of the tenant with most waiting is refused, this one or another
         ├──> the deadline passes
         └──> the gateway stops

With room to spare nothing waits and no task is made. `leave` is right at any time, so one `finally` releases
everything. The queue is looked at again when work leaves, when a prompt was prefilled, and when workers come and go.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from math import inf

from services.gateway.admission.capacity import Admitted, Capacity
from services.gateway.admission.fair_queue import FairQueue, TenantLine, Weights, Work
from services.gateway.admission.forecast import Forecast
from services.gateway.admission.priority import PriorityClass
from services.gateway.admission.shares import demand_of, share_of
from services.gateway.errors import GatewayError, Overloaded, TimedOut
from services.gateway.returns import Returns
from tandem.registry import ClusterView, Demand

FOLLOW_S = 0.25
# Forecasts are inexact: work does not wait for a turn that uses more than this part of its time.
SURE = 0.7
LOOKED_UP = 2**16  # tokens looked up at a time, which takes 4 ms


class Admission:
    """The waiting and the admitted work of one model. `run` follows the cluster's capacity."""

    def __init__(self, queue: FairQueue, max_queued: int) -> None:
        """`max_queued`: the most waiting at all gateways of the model; each has an equal part."""
        self.admitted = Admitted()
        self.demand: Demand = []  # waiting and admitted work at the last look at the cluster
        self._forecast, self._returns = Forecast(), Returns()
        self._queue = queue
        self._max_queued = self._room = max_queued
        # Done when the work is admitted, with an error if it is refused.
        self._turns: dict[Work, asyncio.Future[GatewayError | None]] = {}
        self._stopped: Callable[[], GatewayError] | None = None

    def __len__(self) -> int:
        """Returns how many wait."""
        return len(self._queue)

    def take_over(self, weights: Weights, max_queued: int) -> None:
        """Change limits, from the next look at the cluster on."""
        self._queue.take_over(weights)
        self._room = max(1, self._room * max_queued // self._max_queued)
        self._max_queued = max_queued

    def num_waiting(self, kind: PriorityClass) -> int:
        return self._queue.num_waiting(kind)

    def lines(self) -> list[TenantLine]:
        """Returns the waiting work by class and tenant."""
        return self._queue.lines()

    def check(self, work: Work) -> None:
        """Refuse work that `enter` would refuse as too late, before anything is done for it. Changes nothing.

        Args:
            work: its least possible size, where that is unknown yet.

        Raises:
            Overloaded
        """
        if late := self._too_late(work, has_room=not self._queue and self._fits(work)):
            raise late

    async def enter(self, work: Work) -> None:
        """Wait until `work` is admitted. `leave` must follow in any case.

        Raises:
            Overloaded: it would come too late, or too many wait and this is the one to drop.
            TimedOut: its deadline passed first.
            GatewayError: as made by the argument of `stop`.
        """
        if self._stopped:
            raise self._stopped()
        if not self._queue and self._fits(work):
            if late := self._too_late(work, has_room=True):
                raise late
            self._queue.pass_through(work)
            self._admit(work)
            return
        turn = self._turns[work] = asyncio.get_running_loop().create_future()
        work.start_by = self._forecast.start_by(work, self.admitted, asyncio.get_running_loop().time())
        self._queue.push(work)
        self._let_in()
        if len(self._queue) > self._room:
            last = self._queue.last()
            self._refuse(last, self._full(last))
        if not turn.done() and (late := self._too_late(work)):
            self._refuse(work, late)
        if not turn.done():
            await self._until(turn, work)
        if error := turn.result():
            raise error

    def wrote(self, work: Work, num_tokens: int) -> None:
        """Note new tokens of admitted work."""
        if num_tokens and not work.new_tokens:
            self._forecast.prefilled(work, asyncio.get_running_loop().time())
            self.admitted.prefilled(work)
            self._let_in()
        work.new_tokens += num_tokens

    def leave(self, work: Work) -> None:
        """Note that work has ended, admitted or waiting; does nothing if it is neither."""
        if work in self.admitted:
            self._forecast.ended(work, asyncio.get_running_loop().time())
            self.admitted.leave(work)
            self._queue.correct(work)
        elif work in self._turns:
            self._withdraw(work)
        self._let_in()

    def resize(self, capacity: Capacity | None, others: Sequence[Demand] = ()) -> None:
        """
        Args:
            capacity: of the cluster.
            others: the demands of other gateways.
        """
        self.demand = demand_of((*self.admitted, *self._queue), capacity) if capacity else []
        share = share_of(self.demand, others, self._queue.weights)
        self._queue.weigh(share.classes, share.tenants)
        self._room = max(1, self._max_queued // (1 + len(others)))
        self.admitted.capacity = capacity.times(share.part) if capacity and others else capacity
        self._let_in()

    async def run(
        self, view: ClusterView, capacity: Callable[[], Capacity | None], others: Callable[[], Sequence[Demand]]
    ) -> None:
        """Follow the view until cancelled."""
        while True:
            self.resize(capacity(), others())
            await view.wait_changed(FOLLOW_S)

    def stop(self, error: Callable[[], GatewayError]) -> None:
        """Admit no more work, and refuse what waits.

        Args:
            error: makes one for each: the traceback of a shared error would keep what all its raisers hold.
        """
        self._stopped = error
        for work in list(self._turns):
            self._refuse(work, error())

    def check_integrity(self) -> list[str]:
        """Returns a line for each contradiction; none is healthy."""
        problems = self.admitted.check_integrity() + self._queue.check_integrity()
        if len(self._queue) != len(self._turns):
            problems.append(f"waiting: {len(self._queue)} in line, {len(self._turns)} with a turn to wait for")
        return problems

    # --- turns ---

    def _let_in(self) -> None:
        while self._queue and (work := self._next()) is not None:
            self._queue.take(work)
            self._admit(work)
            self._turns.pop(work).set_result(None)

    def _admit(self, work: Work) -> None:
        now = asyncio.get_running_loop().time()
        work.hurries, work.is_probe = self._forecast.hurries(work, self.admitted, now), self.admitted.is_probe(work)
        self.admitted.enter(work)
        self._forecast.entered(work, self.admitted, now)

    def _next(self) -> Work | None:
        """Returns the next work to admit: the first, or a more urgent one that has room where the first has none."""
        first = self._queue.first()
        if first is None or self._fits(first):
            return first
        return next(filter(self._fits, self._queue.passing()), None)

    def _fits(self, work: Work) -> bool:
        if not self.admitted.fits(work):
            return False
        if not self.admitted.is_probe(work):
            return True
        return not self._forecast.is_cut_as_probe(work, asyncio.get_running_loop().time())

    def _refuse(self, work: Work, error: GatewayError) -> None:
        self._withdraw(work).set_result(error)

    def _withdraw(self, work: Work) -> asyncio.Future[GatewayError | None]:
        self._queue.remove(work)
        return self._turns.pop(work)

    def _too_late(self, work: Work, *, has_room: bool = False) -> Overloaded | None:
        """Returns the error of work that would come too late and delay others in vain; None if it may wait."""
        if work.ttft_s is None and work.end_by == inf:
            return None
        late = self._late(work, has_room)
        if late is not None:
            self._look_up(work)
            late = self._late(work, has_room)
        return None if late is None else self._overloaded(work, *late)

    def _look_up(self, work: Work) -> None:
        """Look up the cached tokens of this prompt and of those before it, a bounded number at a time."""
        left = LOOKED_UP
        for one in (work, *self.admitted.prefilling(), *self._queue):
            if one.look_up is not None and left > 0:
                left -= one.prompt_tokens
                cached, one.look_up = one.look_up(), None
                place = self._queue if one in self._turns else self.admitted
                place.know(one, cached)

    def _late(self, work: Work, has_room: bool) -> tuple[str, str, float] | None:
        """Returns why the work would come too late (code, message), and after how many seconds it would not."""
        now, target = asyncio.get_running_loop().time(), work.ttft_s
        forecast, inside, left = self._forecast, self.admitted, work.end_by - now
        turn_s = 0.0 if has_room else self._turn_s(work, now)
        if not turn_s and not inside.prompts_before(work):
            return None
        last_s, first_s = forecast.last_token_s(turn_s, work, inside), forecast.first_token_s(turn_s, work, inside)
        sure = SURE if turn_s else 1.0
        if last_s > sure * left:
            said = f"it would end in about {last_s:.1f} s, and its deadline is in {left:.1f} s"
            return "deadline_unreachable", said, last_s - sure * left
        if target is not None and first_s > sure * target:
            said = f"its first token would come in about {first_s:.1f} s, and its target is {target:g} s"
            return "too_late", said, first_s - sure * target
        return None

    def _overloaded(self, work: Work, code: str, said: str, room_s: float) -> Overloaded:
        """Returns an error whose retry-after spreads refused clients: the first returns in `room_s`, others later."""
        each_s = self._forecast.each_s(work, self.admitted)
        return Overloaded(said, code, self._returns.wait_s(room_s, each_s, asyncio.get_running_loop().time()))

    def _turn_s(self, work: Work, now: float) -> float:
        """Returns the seconds until its turn if it makes none of its tenant's other work late."""

        def turn_s(until: float) -> float:
            tokens = self._queue.tokens_ahead(work, until)
            to_prefill = tokens * self._queue.prefill_part
            return self._forecast.turn_s(tokens, to_prefill, self.admitted, work.priority_class, now)

        return turn_s(now + turn_s(inf))

    def _full(self, work: Work) -> Overloaded:
        said = f"{self._room} choices wait already, and this one's tenant has most of them"
        return self._overloaded(work, "queue_full", said, self._forecast.each_s(work, self.admitted))

    async def _until(self, turn: asyncio.Future[GatewayError | None], work: Work) -> None:
        began = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout_at(min(work.deadline, work.start_by)):
                await asyncio.wait({turn})
        except TimeoutError:
            if turn.done():
                return
            if work.deadline <= work.start_by:
                late = "the request's deadline passed while it waited for its turn"
                raise TimedOut(late, code="queue_timeout") from None
            now = asyncio.get_running_loop().time()
            said = f"it has waited {now - began:.1f} s, and its turn would come too late for its target or its deadline"
            raise self._overloaded(work, "too_late", said, self._turn_s(work, now)) from None
