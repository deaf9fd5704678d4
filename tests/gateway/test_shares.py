"""Several gateways, one cluster: together they let in what one would, whichever gateway a request comes through."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.__main__ import make_gateway
from services.gateway.admission import Admission, Capacity, FairQueue, Weights, Work
from services.gateway.admission.priority import PriorityClass
from services.gateway.admission.shares import MAX_TOLD, demand_of, fill, share_of
from services.gateway.settings import GatewaySettings
from tandem.local import free_ports
from tandem.registry import Demand
from tests.gateway.conftest import eventually
from tests.gateway.peers import Peers

REALTIME, INTERACTIVE, BATCH = PriorityClass
WEIGHTS = Weights({REALTIME: 8, INTERACTIVE: 4, BATCH: 1}, {"twice": 2})
CAPACITY = Capacity(tokens=1000, sequences=100, prompt_tokens=10_000, prompts=4)
DEMANDS = st.lists(
    st.dictionaries(
        st.tuples(st.sampled_from([0, 1, 2]), st.sampled_from(["a", "b", "twice"])), st.floats(0.001, 5), max_size=5
    ).map(lambda told: [(kind, tenant, filled) for (kind, tenant), filled in told.items()]),
    min_size=2, max_size=4,
)  # fmt: skip


@given(DEMANDS)
def test_the_cluster_is_shared_out_once(demands: list[Demand]) -> None:
    """Nothing twice, nothing left while anyone has work; and each tenant has what one gateway would give it."""
    shares = [share_of(own, [d for d in demands if d is not own], WEIGHTS) for own in demands]
    assert sum(share.part for share in shares) == pytest.approx(1.0)
    asked: dict[tuple[PriorityClass, str], float] = {}
    for kind, tenant, filled in (told for demand in demands for told in demand):
        asked[PriorityClass(kind), tenant] = asked.get((PriorityClass(kind), tenant), 0.0) + filled
    for place in asked:
        assert sum(share.tenants.get(place, 0.0) for share in shares) == pytest.approx(1.0)
    for kind in {kind for kind, _ in asked}:
        assert sum(share.classes.get(kind, 0.0) for share in shares) == pytest.approx(1.0)


def test_room_goes_by_weight_and_none_gets_more_than_it_asks_for() -> None:
    given_to = fill(1.0, {"small": (1.0, 0.1), "big": (1.0, 5.0), "bigger": (2.0, 9.0)})
    assert given_to == pytest.approx({"small": 0.1, "big": 0.3, "bigger": 0.6})
    assert fill(1.0, {"all": (1.0, 0.2)}) == {"all": 0.2}


def test_a_gateway_alone_has_everything_and_one_with_idle_others_half_of_what_is_spare() -> None:
    own: Demand = [(1, "a", 0.5)]
    assert share_of(own, [], WEIGHTS).part == 1.0
    assert share_of(own, [[]], WEIGHTS).part == pytest.approx(0.75)
    assert share_of([(1, "a", 3.0)], [[]], WEIGHTS).part == 1.0


def test_demand_is_of_what_is_scarcest() -> None:
    def filled(work: Work) -> float:
        [(kind, tenant, amount)] = demand_of([work], CAPACITY)
        assert (kind, tenant) == (int(work.priority_class), work.tenant)
        return amount

    assert filled(Work(BATCH, "a", 1.0, 100, 400)) == 0.5
    assert filled(Work(BATCH, "a", 1.0, 1, 1)) == 0.01
    many = [Work(BATCH, f"t{i}", 1.0, 1, 100 * (i == 7)) for i in range(2 * MAX_TOLD)]
    told = demand_of(many, CAPACITY)
    assert len(told) == MAX_TOLD
    assert told[0][1] == "t7"


async def test_tenants_of_two_gateways_are_served_as_if_they_had_one() -> None:
    """A flood has all of one gateway and half of the other, where a small tenant waits: each is served as much."""
    both = [Admission(FairQueue(WEIGHTS), 1000) for _ in range(2)]
    for admission in both:
        admission.resize(Capacity(tokens=1, sequences=1, prompt_tokens=1, prompts=1, max_tokens=1))
    flood = [(Work(INTERACTIVE, "flood", 1e9, 10, 10), both[i % 2]) for i in range(400)]
    small = [(Work(INTERACTIVE, "small", 1e9, 10, 10), both[1]) for _ in range(200)]
    tasks = [asyncio.create_task(admission.enter(work)) for work, admission in flood + small]
    await asyncio.sleep(0)
    capacity = Capacity(tokens=1000, sequences=100, prompt_tokens=10**6, prompts=1000, max_tokens=1000)
    served: list[str] = []
    for turn in range(6):
        for own, other in (both, both[::-1]):
            own.resize(capacity, [other.demand] if turn else [[(1, "flood", 4.0)]])
        inside = [(work, admission) for admission in both for work in admission.admitted]
        for work, admission in inside:
            admission.leave(work)
        if turn > 1:  # each knows what the other has to do
            assert len(inside) <= capacity.tokens // 20 + len(both)
            served += [work.tenant for work, _ in inside]
    assert len(served) > 180
    assert 0.4 <= served.count("small") / len(served) <= 0.6
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_gateways_tell_each_other_what_they_have_to_do(settings: GatewaySettings, peers: Peers) -> None:
    async with AsyncExitStack() as stack:
        ports = free_ports(2)
        both = [settings.model_copy(update={"http_port": port}) for port in ports]
        gateways = [await stack.enter_async_context(make_gateway(one)) for one in both]
        await eventually(lambda: all(gateway.directory.llms for gateway in gateways))
        busy, idle = (gateway.directory.llm_of(None).admission for gateway in gateways)
        await eventually(lambda: busy.admitted.capacity is not None)
        whole = busy.admitted.capacity
        await eventually(lambda: idle.admitted.capacity is not None)
        assert whole is not None
        enough = Work(BATCH, "flood", 2.0**31, whole.tokens, whole.tokens)
        await busy.enter(enough)
        await eventually(lambda: _tokens(idle) == 0)
        assert _tokens(busy) == whole.tokens
        busy.leave(enough)
        await eventually(lambda: _tokens(idle) == _tokens(busy) == whole.tokens // 2)


def _tokens(admission: Admission) -> int:
    capacity = admission.admitted.capacity
    return 0 if capacity is None else capacity.tokens
