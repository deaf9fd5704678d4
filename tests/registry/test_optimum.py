"""The route chosen is the cheapest there is: compared with every pair and every decode worker, one by one."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import isclose
from uuid import uuid4

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tandem.local import RedisServer
from tandem.registry import (
    LiveWorker,
    NoWorkers,
    PrefillPolicy,
    PromptPrefix,
    Registry,
    Role,
    Route,
    WorkerInfo,
    WorkerLoad,
)
from tests.registry.cluster import BLOCK_SIZE, MODEL, REVISION, TTL, worker_info, worker_load

HASHES = [i.to_bytes(16, "little") for i in range(1, 25)]
STUCK_S = 1e6
RATES = st.sampled_from([0.0, 300.0, 5000.0, 40000.0])


@dataclass(frozen=True)
class WantedPair:
    prompt_tokens: int
    new_tokens: int
    policy: PrefillPolicy
    hits: dict[str, int]  # worker id: blocks
    exclude: frozenset[str]
    ttft_target_s: float = 0.0
    itl_target_s: float = 0.0


@st.composite
def loads(draw: st.DrawFn, role: Role, decodes: int) -> WorkerLoad:
    links = st.sets(st.integers(0, decodes - 1)) if role is Role.PREFILL else st.just(set())
    return worker_load(
        free_blocks=draw(st.integers(0, 64)), num_waiting=draw(st.integers(0, 2)),
        num_running=draw(st.integers(0, 8)), queued_tokens=draw(st.integers(0, 3000)),
        draining=draw(st.booleans()) and draw(st.booleans()), prefill_tokens_per_s=draw(RATES),
        **{f"{name}transfer_tokens_per_s": draw(RATES) for name in ("", "zone_", "far_")},
        step_s=draw(st.sampled_from([0.0, 0.004, 0.05])),
        linked=tuple(f"d{i}-first" for i in draw(links)), likely_tokens=draw(st.sampled_from([0, 1, 40])),
        stuck=draw(st.booleans()) and draw(st.booleans()),
    )  # fmt: skip


@st.composite
def clusters(draw: st.DrawFn) -> list[tuple[WorkerInfo, WorkerLoad]]:
    decodes = draw(st.integers(1, 5))
    ids = [(f"d{i}", Role.DECODE) for i in range(decodes)]
    ids += [(f"p{i}", Role.PREFILL) for i in range(draw(st.integers(0, 5)))]
    layouts = st.sampled_from(["layout", "layout", "layout", "other"])
    sizes, names = st.sampled_from([16, 64, 200]), st.sampled_from(["", "a", "b"])
    return [
        (
            worker_info(
                name,
                role,
                layout_hash=draw(layouts),
                num_blocks=draw(sizes),
                node=draw(names),
                nvlink_domain=draw(st.sampled_from(["", "", "x"])),
                zone=draw(names),
            ),
            draw(loads(role, decodes)),
        )
        for name, role in ids
    ]


@st.composite
def requests(draw: st.DrawFn) -> WantedPair:
    names = st.sampled_from([f"{role}{i}" for role in "pd" for i in range(5)])
    return WantedPair(
        draw(st.integers(24 * BLOCK_SIZE, 500)), draw(st.integers(0, 40)),
        draw(st.sampled_from(["require", "prefer", "auto", "never"])),
        draw(st.dictionaries(names, st.integers(1, 24), max_size=6)), draw(st.frozensets(names, max_size=2)),
        draw(st.sampled_from([0.0, 0.0, 0.1, 1.0])), draw(st.sampled_from([0.0, 0.0, 0.030, 0.200])),
    )  # fmt: skip


def of_one(rate: float, usual: float) -> float:
    return rate - max(-usual / 2, min(rate - usual, usual / 2))


class Costs:
    """The cost model in plain words."""

    def __init__(self, wanted: WantedPair, workers: list[LiveWorker]) -> None:
        self.wanted = wanted
        prefills = [worker for worker in workers if worker.info.role is Role.PREFILL]
        decodes = [worker for worker in workers if worker.info.role is Role.DECODE]
        _, read_at_decode = leveled(decodes, lambda load: per(load.prefill_tokens_per_s), 1 / 8192)
        self.token_s, self.usual = leveled(prefills, lambda load: per(load.prefill_tokens_per_s), read_at_decode)
        self.moved_s, self.usual_moved = moving(prefills)
        self.workers = workers
        busy = sum(self.queue(p) > 0 for p in prefills) / max(len(prefills), 1)
        self.behind = wanted.policy == "auto" and all(self.queue(p) > 0 for p in prefills)
        self.own_work = 16 if wanted.policy == "auto" else 1 + 15 * busy**2
        self.step_s, self.usual_step = leveled(decodes, lambda load: load.step_s, 1 / 64)

    def able(self, worker: LiveWorker) -> bool:
        info, wanted = worker.info, self.wanted
        size = wanted.prompt_tokens + (wanted.new_tokens if info.role is Role.DECODE else 0)
        fits = size <= min(info.max_model_len, info.num_blocks * info.block_size)
        return fits and not worker.load.draining and info.worker_id not in wanted.exclude

    def uncached(self, worker: LiveWorker) -> int:
        return self.wanted.prompt_tokens - BLOCK_SIZE * self.wanted.hits.get(worker.info.worker_id, 0)

    def hit(self, worker: LiveWorker) -> int:
        return BLOCK_SIZE * self.wanted.hits.get(worker.info.worker_id, 0)

    def saved(self, holder: LiveWorker, reader: LiveWorker, token_s: float) -> tuple[int, float]:
        """Tokens that the reader could fetch from this holder, all but the last, and the seconds that takes."""
        whole = (self.wanted.prompt_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE
        tokens = min(whole, self.hit(holder)) - self.hit(reader)
        distance, info = holder.info.location.distance_to(reader.info.location), holder.info
        own = self.moved_s[distance].get(info.worker_id) or MOVED_S[distance](holder.load)
        seconds = 0.001 + tokens * (own or self.usual_moved[distance])
        return (tokens, seconds) if tokens > 0 and seconds < tokens * token_s else (0, 0.0)

    def holders(self, reader: LiveWorker) -> list[LiveWorker]:
        """Those with the most blocks on its node, in its domain, its zone and anywhere, of either role, draining ones,
        too; of equals the oldest."""
        info, hits = reader.info, self.wanted.hits
        found = [
            w
            for w in self.workers
            if not w.load.stuck and w.info.worker_id not in self.wanted.exclude
            and hits.get(w.info.worker_id) and w.info.layout_hash == info.layout_hash
        ]  # fmt: skip
        near = [
            [w for w in found if w.info.node == info.node],
            [w for w in found if info.nvlink_domain and w.info.nvlink_domain == info.nvlink_domain],
            [w for w in found if w.info.zone == info.zone],
            found,
        ]
        return [max(some, key=lambda w: (hits[w.info.worker_id], -int(w.generation))) for some in near if some]

    def fetched(self, reader: LiveWorker, token_s: float) -> tuple[int, float]:
        """Tokens that it had better fetch than compute, and the seconds that takes, from where that saves most."""
        ways = (self.saved(holder, reader, token_s) for holder in self.holders(reader))
        return max(ways, key=lambda way: way[0] * token_s - way[1], default=(0, 0.0))

    def queue(self, worker: LiveWorker) -> int:
        return max(worker.reserved_tokens, worker.load.queued_tokens)

    def writing(self, d: LiveWorker) -> float:
        answer = min(self.wanted.new_tokens, d.load.likely_tokens or self.wanted.new_tokens)
        blocks = math.ceil((self.wanted.prompt_tokens + answer) / BLOCK_SIZE)
        used, num_blocks = max(d.reserved_blocks, d.info.num_blocks - d.load.free_blocks), d.info.num_blocks
        full = used / num_blocks + (d.load.num_running + d.load.num_waiting) / d.info.max_num_seqs
        step_s = self.step_s[d.info.worker_id]
        one_more = blocks / num_blocks * of_one(step_s, self.usual_step)
        return 64 * (full * step_s + one_more) + 8 * (used + blocks > num_blocks) + STUCK_S * d.load.stuck

    def late(self, first_s: float) -> float:
        target_s = self.wanted.ttft_target_s
        late_s = first_s - 0.9 * target_s if target_s else 0.0
        return 16 * (late_s + self.wanted.prompt_tokens * self.usual) if late_s > 0 else 0.0

    def pair(self, p: LiveWorker, d: LiveWorker) -> float:
        token_s = self.token_s[p.info.worker_id]
        fetched, fetching_s = self.fetched(p, token_s)
        tokens = max(self.uncached(p) - fetched, 1)
        one_more = of_one(token_s, self.usual) + (self.own_work - 1) * self.usual
        waiting = self.queue(p) * token_s + fetching_s
        prefilling = waiting + tokens * one_more + self.late(waiting + tokens * token_s)
        moved_s = self.moved_s[p.info.location.distance_to(d.info.location)][p.info.worker_id]
        return prefilling + STUCK_S * p.load.stuck + self.uncached(d) * moved_s + self.writing(d)

    def alone(self, d: LiveWorker) -> float:
        usual = self.usual
        token_s = per(d.load.prefill_tokens_per_s) or usual
        fetched, fetching_s = self.fetched(d, token_s)
        uncached = max(self.uncached(d) - fetched, 1)
        copied = 0.5 * BLOCK_SIZE * 16 * usual if fetched else 0.0
        waiting, paused = self.queue(d) * token_s, 1 + d.load.num_running + d.load.num_waiting
        step_s, target_s = self.step_s[d.info.worker_id], self.wanted.itl_target_s
        room_s = 0.9 * target_s - 2 * step_s
        if room_s > 0 and (paused > 1 or self.behind):
            slower = (step_s + room_s) / room_s
            waiting = waiting * slower + fetching_s
            late = self.late(waiting + uncached * token_s * slower)
            return waiting + copied + uncached * (of_one(token_s, usual) * slower + 15 * usual) + late + self.writing(d)
        pause = waiting + uncached * token_s
        late = self.late(pause + fetching_s)
        return (
            waiting
            + fetching_s
            + copied
            + 16 * uncached * token_s
            + paused * pause**2 / step_s
            + late
            + self.writing(d)
        )

    def best(self, workers: list[LiveWorker]) -> float:
        """The cheapest allowed route's cost; infinite if there is none."""
        policy = self.wanted.policy
        able = [worker for worker in workers if self.able(worker)]
        decodes = [worker for worker in able if worker.info.role is Role.DECODE]
        pairs = [] if policy == "never" else list(linked_pairs(able, decodes))
        remote = min((self.pair(p, d) for p, d in pairs), default=math.inf)
        local = min((self.alone(d) for d in decodes), default=math.inf)
        if policy == "prefer" and remote >= STUCK_S > local:
            return local
        if policy == "auto" and pairs:
            return min(remote + 0.002, local)
        return remote if pairs or policy == "require" else local

    def fetches_best(self, route: Route) -> bool:
        """True if the route's worker that prefills fetches from where that saves most; from nowhere, if nowhere."""
        by_id = {worker.info.worker_id: worker for worker in self.workers}
        reader = by_id[(route.prefill or route.decode).info.worker_id]
        token_s = self.token_s.get(reader.info.worker_id) or per(reader.load.prefill_tokens_per_s) or self.usual
        tokens, seconds = self.fetched(reader, token_s)
        if route.holder is None:
            return tokens == 0
        holder = by_id[route.holder.info.worker_id]
        own_tokens, own_s = self.saved(holder, reader, token_s)
        return own_tokens > 0 and isclose(own_tokens * token_s - own_s, tokens * token_s - seconds, abs_tol=1e-9)

    def of(self, route: Route, workers: list[LiveWorker]) -> float:
        by_id = {worker.info.worker_id: worker for worker in workers}
        d = by_id[route.decode.info.worker_id]
        if route.prefill is not None:
            p = by_id[route.prefill.info.worker_id]
            return self.pair(p, d) + 0.002 * (self.wanted.policy == "auto")
        return self.alone(d)


def per(rate: float) -> float:
    return 1 / rate if rate else 0.0


# By distance.
MOVED_S: list[Callable[[WorkerLoad], float]] = [
    lambda load: per(load.transfer_tokens_per_s), lambda load: per(load.zone_transfer_tokens_per_s),
    lambda load: per(load.far_transfer_tokens_per_s),
]  # fmt: skip


def moving(prefills: list[LiveWorker]) -> tuple[list[dict[str, float]], list[float]]:
    """Seconds a token, by distance, of each and the mean; a distance that nobody knows is half or twice as quick as the
    next one known."""
    known = {i: leveled(prefills, rate, 0.0)[1] for i, rate in enumerate(MOVED_S)}
    known = {i: mean for i, mean in known.items() if mean}
    found = []
    for i, rate in enumerate(MOVED_S):
        shorter, longer = [j for j in known if j < i], [j for j in known if j > i]
        next_one = max(shorter) if shorter else min(longer) if longer else 0
        found.append(leveled(prefills, rate, known.get(next_one, 1 / 32768) * 2.0 ** (i - next_one)))
    return [values for values, _ in found], [mean for _, mean in found]


def leveled(
    workers: list[LiveWorker], seconds: Callable[[WorkerLoad], float], nominal: float
) -> tuple[dict[str, float], float]:
    """By worker id: the mean of those measured, where a worker is not or is within a quarter of it; and the mean."""
    values = {worker.info.worker_id: seconds(worker.load) for worker in workers}
    measured = [value for value in values.values() if value]
    mean = sum(measured) / len(measured) if measured else nominal
    return {name: mean if not s or abs(s - mean) <= 0.25 * mean else s for name, s in values.items()}, mean


def linked_pairs(able: list[LiveWorker], decodes: list[LiveWorker]) -> Iterator[tuple[LiveWorker, LiveWorker]]:
    for p in able:
        for d in decodes:
            linked = d.info.incarnation in p.load.linked and d.info.role is Role.DECODE
            if linked and p.info.role is Role.PREFILL and p.info.layout_hash == d.info.layout_hash:
                yield p, d


async def ask(registry: Registry, wanted: WantedPair, workers: list[LiveWorker]) -> Route:
    generations = {worker.info.worker_id: worker.generation for worker in workers}
    held = [(count, (generations[name],)) for name, count in wanted.hits.items() if name in generations]
    return await registry.reservations.select_and_reserve(
        request_id="r", model=MODEL, prompt_tokens=wanted.prompt_tokens, max_new_tokens=wanted.new_tokens,
        prefill=wanted.policy, prefix=PromptPrefix(REVISION, BLOCK_SIZE, b"", PromptPrefix.of("", 1, (), held).held),
        ttft_target_s=wanted.ttft_target_s, itl_target_s=wanted.itl_target_s, ttl=TTL, exclude=wanted.exclude,
    )  # fmt: skip


async def start(url: str, cluster: list[tuple[WorkerInfo, WorkerLoad]]) -> Registry:
    registry = Registry.connect(url, namespace=uuid4().hex, timeout=30.0)
    for info, load in cluster:
        await registry.leases.heartbeat(
            info, load, TTL
        )  # which, unlike `register`, takes a lease whatever the KV layout
    return registry


async def check(url: str, cluster: list[tuple[WorkerInfo, WorkerLoad]], asked: list[WantedPair]) -> None:
    registry = await start(url, cluster)
    for wanted in asked:
        workers = await registry.workers()
        costs = Costs(wanted, workers)
        try:
            route = await ask(registry, wanted, workers)
        except NoWorkers:
            assert costs.best(workers) == math.inf
        else:
            best = costs.best(workers)
            own_work = costs.own_work if route.prefill else 16
            within = best + 0.5 * BLOCK_SIZE * own_work * costs.usual  # less than half a block's hit is no difference
            assert best * (1 - 1e-9) <= costs.of(route, workers) <= within * (1 + 1e-9)
            assert costs.fetches_best(route)
    assert (await registry.check_integrity()).violations == ()
    await registry.close()


async def both_ways(url: str, cluster: list[tuple[WorkerInfo, WorkerLoad]], asked: list[WantedPair]) -> None:
    def said(outcome: Route | BaseException) -> str:
        return outcome.reason if isinstance(outcome, Route) else str(outcome)

    one, other = await start(url, cluster), await start(url, cluster)
    workers = await one.workers()
    in_turn = [(await asyncio.gather(ask(one, wanted, workers), return_exceptions=True))[0] for wanted in asked]
    workers = await other.workers()
    at_once = await asyncio.gather(*(ask(other, wanted, workers) for wanted in asked), return_exceptions=True)
    assert list(map(said, in_turn)) == list(map(said, at_once))
    sums = [{w.info.worker_id: (w.reserved_tokens, w.reserved_blocks) for w in await r.workers()} for r in (one, other)]
    assert sorted(sums[0].values()) == sorted(sums[1].values())
    await one.close()
    await other.close()


OFTEN = settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.mark.long
@OFTEN
@given(cluster=clusters(), asked=st.lists(requests(), min_size=1, max_size=4))
def test_no_route_is_cheaper_than_the_one_chosen(
    redis_server: RedisServer, cluster: list[tuple[WorkerInfo, WorkerLoad]], asked: list[WantedPair]
) -> None:
    asyncio.run(check(redis_server.url, cluster, asked))


@pytest.mark.long
@OFTEN
@given(cluster=clusters(), asked=st.lists(requests(), min_size=2, max_size=6))
def test_requests_routed_together_go_as_they_would_one_by_one(
    redis_server: RedisServer, cluster: list[tuple[WorkerInfo, WorkerLoad]], asked: list[WantedPair]
) -> None:
    asyncio.run(both_ways(redis_server.url, cluster, asked))
