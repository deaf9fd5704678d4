"""Waiting for a turn, on the event loop: who is let in when, who is refused, and that everything is released."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from functools import partial

import pytest

from services.gateway.admission import Admission, Capacity, FairQueue, Weights, Work, capacity_of
from services.gateway.admission.priority import PriorityClass
from services.gateway.errors import GatewayError, Overloaded, TimedOut, Unavailable
from tandem.registry import LiveWorker, Role, WorkerInfo, WorkerLoad

pytestmark = pytest.mark.fast

REALTIME, INTERACTIVE, BATCH = PriorityClass
FOREVER = 2.0**31


def admission_of(
    tokens: int = 1000,
    sequences: int = 100,
    prompt_tokens: int = 10_000,
    prompts: int = 1,
    max_tokens: int | None = 1000,
    max_queued: int = 100,
) -> Admission:
    admission = Admission(FairQueue(Weights({REALTIME: 8, INTERACTIVE: 4, BATCH: 1})), max_queued)
    admission.resize(Capacity(tokens, sequences, prompt_tokens, prompts, max_tokens))
    return admission


def work(
    kind: PriorityClass = INTERACTIVE, tenant: str = "a", prompt: int = 100, new: int = 400, deadline: float = FOREVER
) -> Work:
    return Work(kind, tenant, deadline, prompt, new, end_by=deadline)


class AdmissionLine:
    """Starts works in order and notes who was let in."""

    def __init__(self, admission: Admission) -> None:
        self.admission = admission
        self.inside: list[Work] = []
        self.tasks: dict[Work, asyncio.Task[None]] = {}

    async def begin(self, *works: Work) -> None:
        for one in works:
            self.tasks[one] = asyncio.create_task(self._enter(one))
            await settle()

    async def _enter(self, one: Work) -> None:
        try:
            await self.admission.enter(one)
            self.inside.append(one)
        except BaseException:
            self.admission.leave(one)
            raise

    def end(self, one: Work) -> None:
        self.inside.remove(one)
        self.admission.leave(one)

    async def close(self) -> None:
        for task in self.tasks.values():
            task.cancel()
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)
        for one in list(self.inside):
            self.end(one)
        assert_empty(self.admission)


async def settle() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


def assert_empty(admission: Admission) -> None:
    assert admission.check_integrity() == []
    assert (admission.admitted.tokens, admission.admitted.prompt_tokens, len(admission.admitted)) == (0, 0, 0)
    assert [admission.num_waiting(kind) for kind in PriorityClass] == [0, 0, 0]


# --- room ---


async def test_with_room_nothing_waits_and_no_task_is_made() -> None:
    admission, one = admission_of(), work()
    tasks = asyncio.all_tasks()
    entering = admission.enter(one)
    with pytest.raises(StopIteration):
        entering.send(None)
    assert asyncio.all_tasks() == tasks
    assert admission.admitted.tokens == 500
    admission.leave(one)
    assert_empty(admission)


async def test_a_full_cluster_lets_in_in_order_as_room_comes_back() -> None:
    line = AdmissionLine(admission_of())
    first, second, *rest = [work() for _ in range(4)]
    urgent = work(REALTIME, "b")
    await line.begin(first, second, *rest, urgent)
    assert line.inside == [first, second]
    line.end(first)
    await settle()
    assert line.inside == [second, urgent]
    line.end(second)
    await settle()
    assert line.inside == [urgent, rest[0]]
    await line.close()


async def test_a_big_one_is_not_passed_by_smaller_ones() -> None:
    line = AdmissionLine(admission_of())
    first, second, big, small = work(), work(new=300), work(new=900), work(new=1)
    await line.begin(first, second, big, small)
    line.end(second)
    await settle()
    assert line.inside == [first]
    line.end(first)
    await settle()
    assert line.inside == [big]
    await line.close()


async def test_what_no_cluster_holds_is_let_in_alone_for_the_router_to_refuse() -> None:
    line, giant = AdmissionLine(admission_of()), work(new=10**9)
    await line.begin(giant)
    assert line.inside == [giant]
    await line.close()


async def test_beyond_the_count_one_at_a_time_is_let_in_as_long_as_blocks_are_found() -> None:
    """They share cached blocks, so the cluster holds more than their sum."""
    line = AdmissionLine(admission_of(max_tokens=None))
    works = [work() for _ in range(5)]
    await line.begin(*works)
    assert line.inside == works[:2]
    for i in range(2, 5):
        for one in works[:i]:
            line.admission.wrote(one, 1)
        await settle()
        assert line.inside == works[: i + 1]
    await line.close()


async def test_beyond_the_count_nobody_is_let_in_whose_deadline_blocks_came_too_late_for() -> None:
    line, probe = AdmissionLine(admission_of(max_tokens=None)), work()
    await line.begin(work(), work())
    for one in line.inside:
        line.admission.wrote(one, 1)
    await line.begin(probe)
    await asyncio.sleep(0.3)
    line.admission.wrote(probe, 1)
    now = asyncio.get_running_loop().time()
    hasty, patient = work(deadline=now + 0.25), work(deadline=now + 60)
    await line.begin(hasty)
    assert hasty not in line.inside, "it would wait 0.3 s for its blocks, as the one before it did"
    await line.begin(patient)
    assert patient not in line.inside, "it does not overtake one of its class"
    line.tasks[hasty].cancel()
    await settle()
    assert patient in line.inside
    await line.close()


async def test_an_urgent_one_does_not_wait_behind_one_that_looks_for_blocks() -> None:
    line = AdmissionLine(admission_of(max_tokens=None))
    works = [work(BATCH) for _ in range(4)]
    await line.begin(*works)
    for one in works[:2]:
        line.admission.wrote(one, 1)
    await settle()
    assert line.inside == works[:3]
    urgent = work(REALTIME)
    await line.begin(urgent)
    assert line.inside == [*works[:3], urgent]
    await line.close()


@pytest.mark.parametrize(
    ("bound", "held"), [({"sequences": 3}, 3), ({"prompt_tokens": 250}, 2), ({"prompt_tokens": 50, "prompts": 3}, 3)]
)
async def test_sequences_and_waiting_prompts_are_bounded_too(bound: dict[str, int], held: int) -> None:
    line = AdmissionLine(admission_of(tokens=10**6, max_tokens=None, **bound))
    works = [work() for _ in range(5)]
    await line.begin(*works)
    assert line.inside == works[:held]
    line.admission.wrote(works[0], 1)
    await settle()
    assert len(line.inside) == held + ("prompt_tokens" in bound)
    await line.close()


async def test_workers_that_come_let_more_in_and_none_at_all_hold_nobody_back() -> None:
    line = AdmissionLine(admission_of())
    works = [work() for _ in range(8)]
    await line.begin(*works)
    line.admission.resize(Capacity(2000, 100, 10_000, 1))
    await settle()
    assert line.inside == works[:4]
    line.admission.resize(None)
    await settle()
    assert line.inside == works
    await line.close()


# --- ends without a turn ---


async def test_the_deadline_ends_the_wait() -> None:
    line = AdmissionLine(admission_of())
    late = work(deadline=asyncio.get_running_loop().time() + 0.05)
    await line.begin(work(), work(), late, work())
    with pytest.raises(TimedOut, match="waited for its turn"):
        await line.tasks[late]
    assert line.admission.num_waiting(INTERACTIVE) == 1
    await line.close()


async def test_one_that_gives_up_leaves_at_once_and_lets_the_next_one_in() -> None:
    line = AdmissionLine(admission_of())
    inside, big, small = work(), work(new=900), work()
    await line.begin(inside, big, small)
    assert line.inside == [inside]
    line.tasks[big].cancel()
    await settle()
    assert line.inside == [inside, small]
    await line.close()


async def test_one_that_gives_up_in_the_moment_of_its_turn_keeps_nothing() -> None:
    line = AdmissionLine(admission_of())
    first, waits = work(new=900), work(new=900)
    await line.begin(first, waits)
    line.end(first)
    line.tasks[waits].cancel()
    await settle()
    assert line.tasks[waits].cancelled()
    assert_empty(line.admission)


async def test_too_many_waiting_refuses_the_tenant_that_fills_the_line() -> None:
    line = AdmissionLine(admission_of(max_queued=4))
    flood = [work(BATCH, "flood", deadline=FOREVER + i) for i in range(8)]
    await line.begin(*flood)
    refused = [one for one in flood if line.tasks[one].done() and line.tasks[one].exception()]
    assert refused == flood[6:]
    urgent = work(REALTIME, "small")
    await line.begin(urgent)
    assert not line.tasks[urgent].done()
    error = line.tasks[flood[5]].exception()
    assert isinstance(error, Overloaded)
    assert error.code == "queue_full"
    await line.close()


async def test_of_several_gateways_each_keeps_its_part_of_the_line() -> None:
    line = AdmissionLine(admission_of(max_queued=6))
    line.admission.resize(Capacity(1, 1, 1, 1, 1), others=[[], []])
    works = [work(deadline=FOREVER + i) for i in range(5)]
    await line.begin(*works)
    assert [one for one in works if line.tasks[one].done() and line.tasks[one].exception()] == works[3:]
    line.admission.resize(Capacity(1, 1, 1, 1, 1))
    await line.begin(*(more := [work(deadline=FOREVER + 10 + i) for i in range(5)]))
    assert [one for one in more if line.tasks[one].done() and line.tasks[one].exception()] == more[4:]
    await line.close()


async def test_stopping_ends_those_that_wait_and_refuses_more() -> None:
    line = AdmissionLine(admission_of())
    works = [work() for _ in range(4)]
    await line.begin(*works)
    line.admission.stop(partial(Unavailable, "the gateway is stopping", code="stopping"))
    await line.begin(late := work())
    errors = [line.tasks[one].exception() for one in (*works[2:], late)]
    assert all(isinstance(error, Unavailable) for error in errors)
    assert len(set(map(id, errors))) == 3  # a shared one would keep all that it was raised through
    assert line.inside == works[:2]
    await line.close()


# --- conservation ---


@pytest.mark.parametrize("seed", range(8))
async def test_whatever_is_cancelled_when_everything_is_given_back(seed: int) -> None:
    chance = random.Random(seed)
    admission = admission_of(max_tokens=2000, sequences=6, prompt_tokens=600, max_queued=12)

    async def request() -> None:
        one = work(
            chance.choice(list(PriorityClass)),
            chance.choice("abc"),
            prompt=chance.randrange(1, 300),
            new=chance.randrange(1, 900),
            deadline=asyncio.get_running_loop().time() + chance.choice((0.005, 3600)),
        )
        try:
            await admission.enter(one)
            for _ in range(chance.randrange(4)):
                await asyncio.sleep(chance.random() * 0.003)
                admission.wrote(one, chance.randrange(2))
        finally:
            admission.leave(one)

    tasks = []
    for _ in range(150):
        tasks.append(asyncio.create_task(request()))
        await asyncio.sleep(chance.random() * 0.001)
        if chance.random() < 0.3:
            chance.choice(tasks).cancel()
        assert admission.check_integrity() == []
    ended = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60)
    assert all(isinstance(end, GatewayError | asyncio.CancelledError | None) for end in ended)
    assert ended.count(None) > 30
    assert_empty(admission)


# --- capacity ---


def worker(role: Role, draining: bool = False, **other: int) -> LiveWorker:
    sizes = {"block_size": 16, "num_blocks": 100, "max_num_seqs": 8, "max_model_len": 512, **other}
    info = WorkerInfo(
        worker_id="w", role=role, incarnation="i", grpc_address="x:1", transfer_address="x:2", model="m", revision="r",
        layout_hash="l", transports=("tcp",), host="h", **sizes,
    )  # fmt: skip
    return LiveWorker(info, WorkerLoad(0, 0, 0, 0, draining=draining), 0, 0, "")


P, D = worker(Role.PREFILL), worker(Role.DECODE)


@pytest.mark.parametrize(
    ("workers", "max_tokens", "expected"),
    [
        ([], None, None),
        ([P], None, None),
        ([P, worker(Role.DECODE, draining=True)], None, None),
        ([P, D], None, Capacity(1600, 12, 50, 4)),
        ([P, P, P, D, D], None, Capacity(3200, 28, 150, 12)),
        ([D, D], None, Capacity(3200, 16, 100, 8)),
        ([P, D, worker(Role.DECODE, draining=True)], None, Capacity(1600, 12, 50, 4)),
        ([P, D], 1000, Capacity(1600, 12, 50, 4, 1000)),
    ],
)
def test_capacity(workers: Sequence[LiveWorker], max_tokens: int | None, expected: Capacity | None) -> None:
    assert capacity_of(workers, 50, max_tokens, decodes_prefill=False) == expected


def test_decode_workers_that_prefill_beside_others_have_room_for_prompts_too() -> None:
    assert capacity_of([P, D, D], 50, None, decodes_prefill=True) == Capacity(3200, 20, 150, 12)
    assert capacity_of([D, D], 50, None, decodes_prefill=True) == capacity_of([D, D], 50, None, decodes_prefill=False)


FULL = {"blocks": {"tokens": 2000}, "seats": {"tokens": 20_000, "sequences": 4}}


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("of", FULL)
async def test_a_more_urgent_one_is_not_refused_where_a_less_urgent_one_is_not(of: str, seed: int) -> None:
    """Both have one size, after any history, while the cluster's blocks or seats are full of `flex` and more of it
    waits."""
    rng, loop = random.Random(seed), asyncio.get_running_loop()
    admission = admission_of(max_tokens=None, **FULL[of])
    for _ in range(rng.randint(1, 20)):  # long answers: they entered that long ago
        done = work(rng.choice([INTERACTIVE, BATCH]), new=rng.randint(100, 900))
        await admission.enter(done)
        admission.wrote(done, rng.randint(1, done.max_new_tokens))
        done.entered_at = loop.time() - rng.uniform(1, 30)
        admission.leave(done)
    line = AdmissionLine(admission)
    await line.begin(*(work(BATCH, new=rng.randint(300, 600)) for _ in range(20)))
    for one in line.inside:
        admission.wrote(one, 1)
    await settle()
    new, targets = rng.randint(50, 400), {REALTIME: 5.0, INTERACTIVE: 30.0, BATCH: None}

    def refused(kind: PriorityClass) -> bool:
        one = work(kind, new=new)
        one.ttft_s = targets[kind]
        try:
            admission.check(one)
        except Overloaded:
            return True
        return False

    found = [refused(kind) for kind in (REALTIME, INTERACTIVE, BATCH)]
    assert found == sorted(found)
    await line.close()


@pytest.mark.parametrize("of", FULL)
async def test_a_priority_request_is_let_in_though_flex_answers_are_long(of: str) -> None:
    loop = asyncio.get_running_loop()
    admission = admission_of(max_tokens=None, **FULL[of])
    for _ in range(4):
        done = work(BATCH)
        await admission.enter(done)
        admission.wrote(done, 1)
        done.entered_at = loop.time() - 20
        admission.leave(done)
    line = AdmissionLine(admission)
    await line.begin(*(work(BATCH) for _ in range(12)))
    urgent = work(REALTIME)
    urgent.ttft_s = 5.0
    admission.check(urgent)
    await line.begin(urgent)
    assert urgent in line.inside
    await line.close()


async def test_urgent_ones_pass_a_flex_one_that_has_no_seat_and_it_has_its_turn_all_the_same() -> None:
    admission = admission_of(tokens=100_000, sequences=4, max_tokens=None)
    line = AdmissionLine(admission)
    await line.begin(*(work(BATCH, new=200) for _ in range(5)))
    waiting = next(one for one in line.tasks if one not in line.inside)
    urgent = [work(REALTIME, prompt=50, new=50) for _ in range(40)]
    await line.begin(*urgent)
    assert [one in line.inside for one in urgent] == [True] * 4 + [False] * 36, "as many as there are seats"
    passed = set[Work]()
    while ending := [one for one in line.inside if one in urgent]:
        passed |= {*ending}
        admission.wrote(ending[0], 50)
        line.end(ending[0])
        await settle()
    assert 8 * waiting.cost // 100 <= len(passed) <= 8 * waiting.cost // 100 + 2, "as much as its turn is worth"
    line.end(next(one for one in line.inside))
    await settle()
    assert waiting in line.inside
    await line.close()
