"""Promises of the order of admission: nobody starves, shares follow weights, deadlines are kept, nothing is lost.

Costs are in tokens throughout. `pair` names two parties that share: classes, or tenants of one class.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule, run_state_machine_as_test

from services.gateway.admission import FairQueue, Weights, Work
from services.gateway.admission.priority import PriorityClass

pytestmark = pytest.mark.fast

REALTIME, INTERACTIVE, BATCH = PriorityClass
WEIGHTS = {REALTIME: 8.0, INTERACTIVE: 4.0, BATCH: 1.0}
TENANTS = {"a": 1.0, "b": 3.0, "c": 0.5}
MAX_COST = 400


def queue_of(tenant_weights: dict[str, float] | None = None) -> FairQueue:
    return FairQueue(Weights(WEIGHTS, tenant_weights or {}))


def work(
    kind: PriorityClass = INTERACTIVE, tenant: str = "a", deadline: float = 0.0, prompt: int = 10, new: int = 90
) -> Work:
    return Work(kind, tenant, deadline, prompt, new)


def taken(queue: FairQueue) -> list[Work]:
    return [queue.take() for _ in range(len(queue))]


works = st.builds(
    work,
    kind=st.sampled_from(PriorityClass),
    tenant=st.sampled_from(sorted(TENANTS)),
    deadline=st.integers(0, 5).map(float),
    prompt=st.integers(1, MAX_COST // 2),
    new=st.integers(1, MAX_COST // 2),
)


# --- order ---


@given(st.lists(works))
def test_deadlines_order_a_tenant_of_a_class_strictly(pushed: list[Work]) -> None:
    queue = queue_of(TENANTS)
    for one in pushed:
        queue.push(one)
    order = taken(queue)
    for kind in PriorityClass:
        for tenant in TENANTS:
            mine = [one for one in order if (one.priority_class, one.tenant) == (kind, tenant)]
            assert mine == sorted(mine, key=lambda one: (one.deadline, one.arrival))


def test_one_tenant_has_its_class_in_order_of_deadlines() -> None:
    queue = queue_of()
    for deadline in (5.0, 3.0, 9.0, 1.0, 7.0):
        queue.push(work(deadline=deadline))
    assert [one.deadline for one in taken(queue)] == [1.0, 3.0, 5.0, 7.0, 9.0]


def test_a_tenant_does_not_gain_by_asking_for_shorter_deadlines() -> None:
    queue = queue_of()
    for i in range(4):
        queue.push(work(tenant="hasty", deadline=float(i)))
        queue.push(work(tenant="patient", deadline=1e6 + i))
    order = [one.tenant for one in taken(queue)]
    assert order == ["hasty", "patient"] * 4


def test_a_class_that_was_idle_is_next_whatever_has_queued() -> None:
    queue = queue_of()
    for _ in range(100):
        queue.push(work(BATCH))
    for _ in range(50):
        queue.take()
    queue.push(work(INTERACTIVE))
    queue.push(work(REALTIME))
    assert [queue.take().priority_class for _ in range(3)] == [REALTIME, INTERACTIVE, BATCH]


# --- shares ---


@given(
    st.dictionaries(st.sampled_from("abcdef"), st.sampled_from((0.5, 1.0, 2.0, 3.0)), min_size=2),
    st.lists(st.tuples(st.integers(1, 200), st.integers(1, 200)), min_size=40, max_size=120),
    st.integers(1, 80),
    st.integers(0, 40),
)
def test_tenants_that_wait_share_by_weight_within_one_work_of_each(
    weights: dict[str, float], sizes: list[tuple[int, int]], since: int, more: int
) -> None:
    """Between any two moments at which all of them wait, in tokens per weight."""
    queue, left = FairQueue(Weights(WEIGHTS, weights)), dict.fromkeys(weights, 0)
    for i, (prompt, new) in enumerate(sizes):
        for tenant in weights:
            queue.push(work(tenant=tenant, prompt=prompt, new=new, deadline=float(i)))
            left[tenant] += 1
    given_tokens, largest = Counter[str](), max(prompt + new for prompt, new in sizes)
    for step in range(since + more):
        if min(left.values()) == 0:
            break
        one = queue.take()
        left[one.tenant] -= 1
        if step >= since:
            given_tokens[one.tenant] += one.cost
    for f, g in ((f, g) for f in weights for g in weights):
        apart = given_tokens[f] / weights[f] - given_tokens[g] / weights[g]
        assert apart <= largest / weights[f] + largest / weights[g] + 1e-6


@given(st.lists(st.tuples(*[st.integers(1, MAX_COST)] * 3), min_size=30, max_size=60))
def test_classes_that_wait_share_by_weight_within_one_work(costs: list[tuple[int, int, int]]) -> None:
    """From the moment they all begin to wait."""
    queue, largest = queue_of(), 1 + max(map(max, costs))
    for i, row in enumerate(costs):
        for kind, cost in zip(PriorityClass, row, strict=True):
            queue.push(work(kind, prompt=1, new=cost, deadline=float(i)))
    given_tokens = Counter[PriorityClass]()
    while all(queue.num_waiting(kind) for kind in PriorityClass):
        one = queue.take()
        given_tokens[one.priority_class] += one.cost
        shares = {kind: given_tokens[kind] / WEIGHTS[kind] for kind in PriorityClass}
        for f, g in ((f, g) for f in PriorityClass for g in PriorityClass):
            assert shares[f] - shares[g] <= largest / WEIGHTS[f] + 1e-6


@pytest.mark.parametrize("honest_kind", [INTERACTIVE, REALTIME], ids=["tenants", "classes"])
@given(st.lists(st.tuples(st.integers(1, 50), st.integers(1, 50)), min_size=20, max_size=60))
def test_shares_are_of_tokens_really_used(honest_kind: PriorityClass, used: list[tuple[int, int]]) -> None:
    """One asks for twenty times what it uses and gets its share like another that asks for what it uses."""
    queue, weights = queue_of(), {"boast": WEIGHTS[INTERACTIVE], "honest": WEIGHTS[honest_kind]}
    for i, (boast, honest) in enumerate(used * 2):
        queue.push(work(INTERACTIVE, "boast", prompt=1, new=1000, deadline=float(i * 100 + boast)))
        queue.push(work(honest_kind, "honest", prompt=1, new=honest, deadline=float(i * 100 + honest)))
    really = Counter[str]()
    for _ in used:
        one = queue.take()
        one.new_tokens = int(one.deadline % 100)
        queue.correct(one)
        really[one.tenant] += one.prompt_tokens + one.new_tokens
    shares = {name: really[name] / weights[name] for name in weights}
    assert abs(shares["boast"] - shares["honest"]) <= 51 / min(weights.values())


def test_absence_earns_nothing() -> None:
    queue = queue_of()
    for _ in range(40):
        queue.push(work(tenant="busy"))
    for _ in range(20):
        queue.take()
    for _ in range(10):
        queue.push(work(tenant="new"))
    order = "".join(queue.take().tenant[0] for _ in range(8))
    assert order in ("bnbnbnbn", "nbnbnbnb")


def test_what_was_not_used_puts_nobody_before_those_who_wait() -> None:
    """Twenty works end at once that used nothing of what they asked for."""
    queue = queue_of()
    for _ in range(40):
        queue.push(work(tenant="boast", new=1000))
    ended = [queue.take() for _ in range(20)]
    queue.push(work(tenant="waits", new=1000))
    for one in ended:
        queue.correct(one)
    assert "waits" in [queue.take().tenant for _ in range(2)]


# --- no starvation ---


@given(st.lists(st.tuples(works, st.integers(0, MAX_COST)), min_size=1), st.data())
@settings(max_examples=300, deadline=None)
def test_nobody_starves(arrivals: list[tuple[Work, int]], data: st.DataObject) -> None:
    """While a class, or a tenant of it, waits for its next turn, another one of the same weight is given no more
    tokens than it was given itself at its last turn, and one work; others in proportion to their weights."""
    queue = queue_of(TENANTS)
    waits = Waits()
    for one, used in arrivals:
        queue.push(one)
        waits.begin(one)
        for _ in range(data.draw(st.integers(0, min(2, len(queue))))):
            chosen = queue.take()
            chosen.new_tokens = min(used, chosen.max_new_tokens)
            waits.took(chosen, queue)
            queue.correct(chosen)
    while len(queue):
        waits.took(queue.take(), queue)


Pair = tuple[PriorityClass, str | None]


class Waits:
    """For everyone that waits: its last turn's tokens, and what each other one was given since. A class is named by
    (class, None); tenants are compared within their class."""

    def __init__(self) -> None:
        self.last: dict[Pair, int] = {}
        self.given: dict[Pair, Counter[Pair]] = {}

    def begin(self, one: Work) -> None:
        for party in parties(one):
            self.given.setdefault(party, Counter())

    def took(self, one: Work, queue: FairQueue) -> None:
        tokens = one.cost - one.unused
        for party in parties(one):
            for other, given_since in self.given.items():
                if other != party and level(other) == level(party):
                    given_since[party] += tokens
                    bound = weight(party) * self.last.get(other, MAX_COST) / weight(other) + MAX_COST
                    assert given_since[party] <= bound + 1e-6, (other, party)
            self.last[party] = one.cost
            self.given.pop(party)
        self.begin_again(one, queue)

    def begin_again(self, one: Work, queue: FairQueue) -> None:
        kind, tenant = one.priority_class, one.tenant
        if queue.num_waiting(kind):
            self.given[kind, None] = Counter()
        if any(w.tenant == tenant for w in waiting(queue, kind)):
            self.given[kind, tenant] = Counter()


def parties(one: Work) -> list[Pair]:
    return [(one.priority_class, None), (one.priority_class, one.tenant)]


def level(party: Pair) -> object:
    return "class" if party[1] is None else party[0]


def weight(party: Pair) -> float:
    return WEIGHTS[party[0]] if party[1] is None else TENANTS[party[1]]


def waiting(queue: FairQueue, kind: PriorityClass) -> list[Work]:
    return [one for tenant in queue._classes[kind].share.waiting for one in tenant.works]


# --- too many ---


def test_the_last_of_the_tenant_with_most_waiting_goes() -> None:
    queue = queue_of()
    for i in range(5):
        queue.push(work(BATCH, "flood", deadline=float(i)))
    queue.push(work(REALTIME, "small", deadline=99.0))
    gone = queue.last()
    assert (gone.tenant, gone.deadline) == ("flood", 4.0)


def test_among_equals_the_least_urgent_then_the_newest_goes() -> None:
    queue = queue_of()
    for kind, tenant in ((BATCH, "x"), (BATCH, "y"), (REALTIME, "z")):
        queue.push(work(kind, tenant))
    assert queue.last().tenant == "y"


# --- conservation ---


class Life(RuleBasedStateMachine):
    """Any order of coming, leaving, being taken and ending."""

    waiting = Bundle("waiting")
    running = Bundle("running")

    def __init__(self) -> None:
        super().__init__()
        self.queue = queue_of(TENANTS)
        self.works: set[Work] = set()

    @rule(target=waiting, one=works)
    def push(self, one: Work) -> Work:
        one = work(one.priority_class, one.tenant, one.deadline, one.prompt_tokens, one.max_new_tokens)
        self.queue.push(one)
        self.works.add(one)
        return one

    @rule(one=consumes(waiting))
    def leave(self, one: Work) -> None:
        if one in self.works:
            self.works.remove(one)
            self.queue.remove(one)

    @rule(target=running)
    def take(self) -> Work | None:
        first = self.queue.first()
        if first is not None:
            assert self.queue.take() is first
            self.works.remove(first)
        return first

    @rule(one=consumes(running), used=st.integers(0, MAX_COST))
    def end(self, one: Work | None, used: int) -> None:
        if one is not None:
            one.new_tokens = min(used, one.max_new_tokens)
            self.queue.correct(one)

    @invariant()
    def holds(self) -> None:
        assert self.queue.check_integrity() == []
        assert len(self.queue) == len(self.works)
        assert (self.queue.first() in self.works) if self.works else self.queue.first() is None

    def teardown(self) -> None:
        assert set(taken(self.queue)) == self.works


def test_what_comes_and_goes_in_any_order_is_neither_lost_nor_kept() -> None:
    run_state_machine_as_test(Life, settings=settings(max_examples=60, stateful_step_count=40, deadline=None))


def test_tenants_with_nothing_owed_are_forgotten() -> None:
    queue = queue_of()
    for i in range(10_000):
        queue.push(work(tenant=f"t{i}"))
        queue.correct(queue.take())
    assert len(queue._classes[INTERACTIVE].tenants) < 1000


@given(st.lists(st.tuples(works, st.booleans(), st.booleans())), st.lists(works))
def test_what_passes_an_empty_queue_is_charged_as_if_it_had_waited(
    passed: list[tuple[Work, bool, bool]], then: list[Work]
) -> None:
    one, other = queue_of(TENANTS), queue_of(TENANTS)
    for came, passes, ends in passed:
        for queue, by_itself in ((one, passes), (other, False)):
            queued = replace(came)
            if by_itself:
                queue.pass_through(queued)
            else:
                queue.push(queued)
                assert queue.take() is queued
            assert not queue
            if ends:
                queue.correct(queued)
        assert (one.check_integrity(), other.check_integrity()) == ([], [])
    for waiting in then:
        one.push(replace(waiting))
        other.push(replace(waiting))
    assert [(w.tenant, w.priority_class, w.arrival) for w in taken(one)] == [
        (w.tenant, w.priority_class, w.arrival) for w in taken(other)
    ]
