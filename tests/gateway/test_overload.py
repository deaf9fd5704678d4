"""More work than fits, on virtual time: what is accepted comes in time, the rest is refused at once."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from itertools import product
from math import inf

import pytest

from services.gateway.admission import Admission, Capacity, FairQueue, Weights, Work
from services.gateway.admission.priority import PriorityClass
from services.gateway.errors import GatewayError, Overloaded
from tests.marks import long_but
from tests.simulation.world import World

pytestmark = pytest.mark.fast

INTERACTIVE = PriorityClass.INTERACTIVE
WEIGHTS = {PriorityClass.REALTIME: 8.0, INTERACTIVE: 4.0, PriorityClass.BATCH: 1.0}
SLOTS, PREFILL_S, STEP_S, TOKENS = 32, 0.1, 0.02, 32
PEAK = SLOTS / (PREFILL_S + STEP_S * TOKENS)  # choices a second
TTFT_S, WARM_S, RUN_S = 2.0, 5.0, 25.0


@dataclass
class Outcomes:
    good: int = 0
    prefilled: int = 0  # whose prompts were prefilled
    ends: Counter[str] = field(default_factory=Counter)
    refused_after: list[float] = field(default_factory=list)


class Overload:
    """A cluster of so many slots, and clients that come at random, whatever becomes of others."""

    def __init__(self, world: World, deadline_s: float | None, spread: bool) -> None:
        self.admission = Admission(FairQueue(Weights(WEIGHTS)), 100_000)
        self.outcomes = Outcomes()
        self._world, self._deadline_s, self._spread = world, deadline_s, spread

    async def run(self, rate: float) -> None:
        self.admission.resize(Capacity(tokens=10**9, sequences=SLOTS, prompt_tokens=10**9, prompts=SLOTS))
        now, tasks = asyncio.get_running_loop().time, set[asyncio.Task[None]]()
        start = now()
        while now() < start + RUN_S:
            await asyncio.sleep(self._world.random.expovariate(rate))
            tasks.add(asyncio.ensure_future(self._request(now() > start + WARM_S)))
        await asyncio.gather(*tasks)
        assert self.admission.check_integrity() == []

    async def _request(self, counted: bool) -> None:
        now = asyncio.get_running_loop().time
        born, tokens = now(), TOKENS
        if self._spread:
            tokens = self._world.random.choice((TOKENS // 4, TOKENS, TOKENS * 7 // 4))
        end_by = born + (self._deadline_s or inf)
        work = Work(INTERACTIVE, "t", min(end_by, born + 600.0), 100, tokens, TTFT_S, end_by)
        end, first_s = "done", 0.0
        try:
            self.admission.check(Work(INTERACTIVE, "t", work.deadline, 0, tokens, TTFT_S, end_by))
            self.outcomes.prefilled += counted
            await self.admission.enter(work)
            await asyncio.sleep(PREFILL_S)
            self.admission.wrote(work, 1)
            first_s = now() - born
            await asyncio.sleep(STEP_S * tokens)
            self.admission.wrote(work, tokens - 1)
            if now() > work.deadline:
                end = "late"
        except GatewayError as error:
            end = str(error.code)
            if isinstance(error, Overloaded) and counted:
                self.outcomes.refused_after.append(now() - born)
        finally:
            self.admission.leave(work)
        if counted:
            self.outcomes.ends[end] += 1
            self.outcomes.good += end == "done" and first_s <= TTFT_S


@pytest.mark.parametrize(
    ("times", "deadline_s", "spread"),
    long_but([(7.5, 3.0, True)], product([2.0, 7.5], [None, 3.0], [False, True])),
)
def test_goodput_stays_at_its_peak(times: float, deadline_s: float | None, spread: bool) -> None:
    with World(1) as world:
        process = world.process("gateway")
        overload = Overload(world, deadline_s, spread)
        world.run(process, overload.run(times * PEAK))
        outcomes = overload.outcomes
    goodput = outcomes.good / (RUN_S - WARM_S)
    assert goodput >= 0.95 * PEAK, outcomes.ends
    assert outcomes.ends["late"] + outcomes.ends["queue_timeout"] <= 0.02 * outcomes.good
    assert outcomes.prefilled <= 1.1 * (outcomes.good + outcomes.ends["late"]), (
        "hardly a prompt is prefilled for nothing"
    )
    refused = sorted(outcomes.refused_after)
    assert refused[int(0.99 * len(refused))] < 0.010


SLACK = {PriorityClass.REALTIME: 1.0, INTERACTIVE: 5.0, PriorityClass.BATCH: None}


class Mixed(Overload):
    """Clients of all classes, with deadlines and without, that ask for answers of three lengths."""

    def __init__(self, world: World) -> None:
        super().__init__(world, None, spread=True)
        self.ended_at = self.last_refused_at = 0.0

    async def _request(self, counted: bool) -> None:
        chance, now = self._world.random, asyncio.get_running_loop().time
        born, kind, tokens = now(), chance.choice(list(WEIGHTS)), chance.choice((TOKENS // 4, TOKENS, TOKENS * 7 // 4))
        end_by = born + chance.choice((inf, 3.0, 8.0))
        work = Work(kind, "t", min(end_by, born + 600.0), 100, tokens, SLACK[kind], end_by)
        end, self.ended_at = "done", max(self.ended_at, born)
        try:
            self.admission.check(Work(kind, "t", work.deadline, 0, tokens, SLACK[kind], end_by))
            await self.admission.enter(work)
            await asyncio.sleep(PREFILL_S)
            self.admission.wrote(work, 1)
            while work.new_tokens < tokens:
                await asyncio.sleep(STEP_S)
                self.admission.wrote(work, 1)
                if now() > work.deadline:
                    end = "cut"
                    break
        except GatewayError as error:
            end = str(error.code)
            self.last_refused_at = now()
            if counted:
                self.outcomes.refused_after.append(now() - born)
        finally:
            self.admission.leave(work)
        if counted:
            self.outcomes.ends[end] += 1


@pytest.mark.parametrize("times", long_but([3.0], [3.0, 7.5, 15.0]))
def test_mixed_work_is_refused_at_once_or_ends_in_time(times: float) -> None:
    with World(1) as world:
        process = world.process("gateway")
        mixed = Mixed(world)
        world.run(process, mixed.run(times * PEAK))
    ends, refused = mixed.outcomes.ends, sorted(mixed.outcomes.refused_after)
    assert ends["done"] >= 0.95 * PEAK * (RUN_S - WARM_S), ends
    assert refused[int(0.99 * len(refused))] < 0.010, ends
    assert ends["cut"] <= 0.01 * ends["done"], ends
    assert mixed.last_refused_at <= mixed.ended_at + 0.010, "it recovers at once"


def test_who_is_refused_is_told_when_to_come_again() -> None:
    with World(2) as world:
        overload = Overload(world, None, spread=False)
        world.run(process := world.process("gateway"), overload.run(2 * PEAK))

        async def flood() -> list[BaseException | None]:
            works = [Work(INTERACTIVE, "t", 1e9, 100, TOKENS, TTFT_S) for _ in range(500)]
            ended = await asyncio.gather(*map(overload.admission.enter, works), return_exceptions=True)
            for work in works:
                overload.admission.leave(work)
            return ended

        task = process.spawn(flood())
        while not task.done():
            world.step()
    refusals = [error for error in task.result() if isinstance(error, Overloaded)]
    assert refusals
    assert {error.code for error in refusals} == {"too_late"}
    assert max(int(error.headers["retry-after"]) for error in refusals) > 1
    assert any("would come in about" in error.message for error in refusals)


def test_a_full_queue_tells_each_one_when_there_is_room_for_it() -> None:
    """The 500th that is refused comes some 12 s after the first, for 43 choices a second leave the cluster."""
    with World(2) as world:
        overload = Overload(world, None, spread=False)
        process = world.process("gateway")
        world.run(process, overload.run(PEAK))
        overload.admission.take_over(Weights(WEIGHTS), 1000)
        works = [Work(INTERACTIVE, "t", 1e9, 100, TOKENS, None) for _ in range(1000 + SLOTS + 500)]

        async def flood() -> list[BaseException | None]:
            entering = [asyncio.create_task(overload.admission.enter(work)) for work in works]
            await asyncio.sleep(0.1)
            errors = [task.exception() for task in entering if task.done()]
            for task, work in zip(entering, works, strict=True):
                task.cancel()
                overload.admission.leave(work)
            return errors

        task = process.spawn(flood())
        while not task.done():
            world.step()
    full = [error for error in task.result() if isinstance(error, Overloaded)]
    assert {error.code for error in full} == {"queue_full"}
    told = Counter(int(error.headers["retry-after"]) for error in full)
    assert min(told) == 1
    assert 500 / PEAK / 2 <= max(told) <= 500 / PEAK * 2, told
    assert max(told.values()) <= 2 * PEAK + 2, "no more are told to come together than there is room for"


@pytest.mark.parametrize("timeout_s", [600.0, 3.0])
def test_nobody_is_refused_who_names_no_target(timeout_s: float) -> None:
    """Ten times the peak, and a deadline that only the gateway knows of: all wait, in order, until it has passed."""
    with World(5) as world:
        admission = Admission(FairQueue(Weights(WEIGHTS)), 1000)
        admission.resize(Capacity(10**9, SLOTS, 10**9, SLOTS, prefill_tokens_per_s=1000.0))
        order, ends = list[int](), Counter[str]()

        async def ask(i: int) -> None:
            deadline = asyncio.get_running_loop().time() + timeout_s
            work, end = Work(INTERACTIVE, "t", deadline, 100, TOKENS), "done"
            try:
                admission.check(Work(INTERACTIVE, "t", deadline, 0, TOKENS))
                await admission.enter(work)
                order.append(i)
                await asyncio.sleep(PREFILL_S)
                admission.wrote(work, 1)
                await asyncio.sleep(STEP_S * TOKENS)
                admission.wrote(work, TOKENS - 1)
            except GatewayError as error:
                end = str(error.code)
            admission.leave(work)
            ends[end] += 1

        async def burst() -> None:
            await asyncio.gather(*(ask(i) for i in range(10 * SLOTS)))

        world.run(world.process("gateway"), burst())
    assert order == sorted(order)
    assert set(ends) == ({"done"} if timeout_s > 60 else {"done", "queue_timeout"})
    assert ends["done"] >= min(10 * SLOTS, 0.9 * PEAK * timeout_s)


def test_prompts_before_it_make_work_late_though_there_is_room() -> None:
    """One forecast holds for what waits and for what does not: 6,000 prompt tokens at 1,000 a second."""
    with World(6) as world:
        admission = Admission(FairQueue(Weights(WEIGHTS)), 1000)
        admission.resize(Capacity(10**9, SLOTS, 10**9, SLOTS, prefill_tokens_per_s=1000.0))

        async def ask() -> None:
            long = [Work(INTERACTIVE, "t", 1e9, 2000, TOKENS, ttft_s) for ttft_s in (None, None, 5.0, 5.0, 7.0)]
            for work in (long[0], long[1]):
                await admission.enter(work)
            with pytest.raises(Overloaded, match=r"would come in about 6\.0 s, and its target is 5 s") as refused:
                await admission.enter(long[2])
            assert refused.value.headers["retry-after"] == "1"
            with pytest.raises(Overloaded) as again:
                await admission.enter(long[3])
            assert again.value.headers["retry-after"] == "3", "prefilling the one before it takes two seconds"
            await admission.enter(long[4])
            for work in long:
                admission.leave(work)

        world.run(world.process("gateway"), ask())


def test_an_idle_cluster_takes_what_a_bad_time_would_have_refused() -> None:
    with World(3) as world:
        overload = Overload(world, None, spread=False)
        process = world.process("gateway")
        world.run(process, overload.run(7.5 * PEAK))

        async def once() -> None:
            loop = asyncio.get_running_loop()
            work = Work(INTERACTIVE, "t", loop.time() + 0.01, 100, TOKENS, TTFT_S)
            await overload.admission.enter(work)
            overload.admission.leave(work)

        world.run(process, once())


def test_answers_that_began_together_end_together() -> None:
    """A request that comes just behind a wave is refused at once; one that comes before its end waits for it."""
    with World(4) as world:
        admission = Admission(FairQueue(Weights(WEIGHTS)), 1000)
        admission.resize(Capacity(tokens=10**9, sequences=SLOTS, prompt_tokens=10**9, prompts=SLOTS))
        waits_s: list[float] = []

        async def ask(seconds: float) -> None:
            work, came = Work(INTERACTIVE, "t", 1e9, 100, TOKENS, TTFT_S), asyncio.get_running_loop().time()
            try:
                await admission.enter(work)
                waits_s.append(asyncio.get_running_loop().time() - came)
                await asyncio.sleep(PREFILL_S)
                admission.wrote(work, TOKENS)
                await asyncio.sleep(seconds)
            finally:
                admission.leave(work)

        async def waves() -> None:
            for _ in range(2):
                await asyncio.gather(*(ask(4.0) for _ in range(SLOTS)))
            wave = asyncio.gather(*(ask(4.0) for _ in range(SLOTS)))
            await asyncio.sleep(0.5)
            with pytest.raises(Overloaded, match="would come in about"):
                await ask(0.0)
            await asyncio.sleep(3.0)
            await ask(0.0)
            await wave

        world.run(world.process("gateway"), waves())
    assert waits_s == [*[0.0] * 3 * SLOTS, pytest.approx(0.5 + PREFILL_S)]
