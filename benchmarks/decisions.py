"""`python -m benchmarks.decisions`: what one routing decision costs, and what remembering a million blocks does.

1 fill      a real redis-server; 32 prefill and 32 decode workers register, all linked, and tell of 20,000
            conversations of 50 blocks, each held by one of each role: a million blocks, two million locations
2 memory    a process of its own reads them all into a gateway's replica: what its memory grew by; and as many as a
            small `max_blocks` lets it keep
3 closed    routers as gateways run them, one caller alone, then CALLERS in all, each asking again as soon as it has
            its answer
4 open      the same at a stated rate, each time at random: a process of its own says when, as clients do over the
            network; latency from when a request was due to its route. Beside it a bare PING at the lowest rate: what
            waking up costs on this machine, whatever is asked

Three of four prompts go on with a conversation (800 tokens and 16 to 224 more), one is new (320 to 1024 tokens); none
comes twice. A decision is `Router.choose`: hash the prompt, look it up, choose and reserve. In `whole` runs each is
also released in the two parts that a request releases, for which no caller waits, and that is counted as its cost.
CPU seconds are the kernel's: of this process, in which all routers run, and of Redis.
"""

from __future__ import annotations

import asyncio
import gc
import json
import multiprocessing
import os
import random
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from typing import Any

import psutil  # type: ignore[import-untyped]
import uvloop

from benchmarks.models import OUT
from benchmarks.results import percentile
from services.gateway.routing import Router, RouteRequest
from services.gateway.settings import Disaggregation
from tandem.block_hash import block_hashes, root_hash
from tandem.local import RedisServer
from tandem.registry import BlockReplica, ClusterView, Registry, Role, Route, WorkerInfo, WorkerLoad
from tandem.v1 import worker_pb2

MODEL, REVISION, BLOCK_SIZE, TTL_S = "bench", "r1", 16, 3600.0
PAIRS, CONVERSATIONS, SHARED_BLOCKS = 32, 20_000, 50
CALLERS, DECISIONS, ALONE = 64, 10_000, 3_000
MAX_BLOCKS = (2_000_000, 250_000)  # a gateway's default; a smaller one
OPEN_RATES, OPEN_S = (500, 1000, 2000, 4000), 3.0
SPAWN, DUE = multiprocessing.get_context("spawn"), struct.Struct("d")
RESULTS = OUT / "decisions.json"


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one run. CPU in seconds."""

    run: str
    gateways: int
    decisions: int
    seconds: float
    client_cpu: float
    redis_cpu: float
    p50_ms: float
    p99_ms: float
    hit_rate: float  # of prompt tokens, at the worker that reads them

    def line(self) -> str:
        both = self.client_cpu + self.redis_cpu
        return (
            f"{self.run:<14} {self.gateways} gateways: {self.decisions / self.seconds:5.0f}/s; per core-second of "
            f"gateways {self.decisions / self.client_cpu:5.0f}, Redis {self.decisions / self.redis_cpu:5.0f}, both "
            f"{self.decisions / both:5.0f}; p50 {self.p50_ms:.2f} ms, p99 {self.p99_ms:.2f}; hits {self.hit_rate:.1%}"
        )


# --- fill ---


def conversation(number: int) -> list[int]:
    return random.Random(number).choices(range(1, 32_000), k=SHARED_BLOCKS * BLOCK_SIZE)


def hashes(tokens: Sequence[int]) -> list[bytes]:
    return block_hashes(root_hash(MODEL, REVISION), tokens, BLOCK_SIZE)


async def register(registry: Registry) -> None:
    size = {"block_size": BLOCK_SIZE, "num_blocks": 40_000, "max_num_seqs": 256, "max_model_len": 16_384}
    links = tuple(f"d{i}-1" for i in range(PAIRS))
    for i in range(PAIRS):
        for name, role, linked in ((f"d{i}", Role.DECODE, ()), (f"p{i}", Role.PREFILL, links)):
            info = WorkerInfo(
                worker_id=name, role=role, incarnation=f"{name}-1", grpc_address=f"{name}:1", transfer_address="",
                model=MODEL, revision=REVISION, layout_hash="l", transports=("tcp",), host="h", **size,
            )  # fmt: skip
            await registry.register(info, WorkerLoad(40_000, 0, 0, 0, linked=linked), TTL_S)


async def fill(registry: Registry) -> None:
    await register(registry)
    held: dict[str, list[bytes]] = {f"{role}{i}": [] for role in "pd" for i in range(PAIRS)}
    for number in range(CONVERSATIONS):
        names = hashes(conversation(number))
        for worker in (f"p{number % PAIRS}", f"d{number * 7 % PAIRS}"):
            held[worker] += names
    for worker, names in held.items():
        for start in range(0, len(names), 1024):
            await registry.publish_blocks(worker, f"{worker}-1", names[start : start + 1024], [])


# --- memory ---


def replica_memory(url: str, max_blocks: int) -> dict[str, float]:
    return asyncio.run(_replica_memory(url, max_blocks))


async def _replica_memory(url: str, max_blocks: int) -> dict[str, float]:
    registry = Registry.connect(url)
    replica = BlockReplica(registry.block_feed, max_blocks=max_blocks)
    await registry.workers()
    gc.collect()
    before, start = psutil.Process().memory_info().rss, time.perf_counter()
    await replica.refresh()
    seconds = time.perf_counter() - start
    gc.collect()
    grown = (psutil.Process().memory_info().rss - before) / 2**20
    await registry.close()
    return {"max_blocks": max_blocks, "blocks": len(replica), "MiB": grown, "seconds": seconds}


# --- runs ---


def prompts(seed: int, count: int) -> list[RouteRequest]:
    """As requests bring them: token ids in a proto."""
    chance = random.Random(f"prompts {seed}")
    return [RouteRequest(f"r{number}", _prompt(chance, number), "", 64, 600.0) for number in range(count)]


def _prompt(chance: random.Random, number: int) -> Sequence[int]:
    if number % 4:
        tokens = conversation(chance.randrange(CONVERSATIONS))
        tokens += chance.choices(range(1, 32_000), k=chance.randint(16, 224))
    else:
        tokens = chance.choices(range(1, 32_000), k=chance.randint(320, 1024))
    return worker_pb2.SequenceSpec(token_ids=tokens).token_ids


async def arrivals(rate: float, count: int, arrived: Callable[[int, float], None]) -> None:
    """Calls arrived(number, when it was due) for each. Times are time.perf_counter's, which all processes of a Linux
    machine share."""
    loop = asyncio.get_running_loop()
    receiver, sender = SPAWN.Pipe(duplex=False)
    clients = SPAWN.Process(target=send_arrivals, args=(sender, rate, count))
    clients.start()
    sender.close()
    number, ended = 0, loop.create_future()

    def read() -> None:
        nonlocal number
        said = os.read(receiver.fileno(), 64 * DUE.size)
        for (due,) in DUE.iter_unpack(said):
            arrived(number, due)
            number += 1
        if not said:
            loop.remove_reader(receiver.fileno())
            ended.set_result(None)

    loop.add_reader(receiver.fileno(), read)
    await ended
    clients.join()
    if number < count:
        raise RuntimeError(f"the process that says when requests arrive ended {count - number} too early")


def send_arrivals(pipe: Connection, rate: float, count: int) -> None:
    chance, due = random.Random(1), time.perf_counter() + 0.1
    for _ in range(count):
        due += chance.expovariate(rate)
        time.sleep(max(0.0, due - time.perf_counter()))
        os.write(pipe.fileno(), DUE.pack(due))


class Bench:
    """Routers of so many gateways; one replica serves all, as its content is the same."""

    def __init__(self, routers: Sequence[Router], redis: RedisServer) -> None:
        self.routers = routers
        self._redis = psutil.Process(redis.pid)
        self._num_runs = 0
        self._latencies: list[float] = []
        self._hits: list[float] = []
        self._routes: list[tuple[Router, Route]] = []
        self._giving_back: set[asyncio.Task[None]] = set()

    async def closed(self, name: str, whole: bool, callers: int = CALLERS) -> Figures:
        requests = iter(self._fresh(DECISIONS if callers > 1 else ALONE))

        async def caller(router: Router) -> None:
            for request in requests:
                await self._one(router, request, time.perf_counter(), whole)

        async def run() -> None:
            await asyncio.gather(*(caller(self.routers[i % len(self.routers)]) for i in range(callers)))

        return await self._measured(name, run)

    async def open(self, rate: float) -> Figures:
        asked = self._fresh(round(rate * OPEN_S))

        async def one(number: int, due: float) -> None:
            await self._one(self.routers[number % len(self.routers)], asked[number], due, whole=True)

        return await self._open(f"open, {rate:.0f}/s", rate, one)

    async def bare(self, rate: float, registry: Registry) -> Figures:
        """What such a rate costs whatever is asked: each asks Redis only whether it is there."""

        async def one(number: int, due: float) -> None:
            await registry.ping()
            self._latencies.append(time.perf_counter() - due)
            self._hits.append(0.0)

        return await self._open(f"PING, {rate:.0f}/s", rate, one)

    async def _open(self, name: str, rate: float, one: Callable[[int, float], Coroutine[Any, Any, None]]) -> Figures:
        tasks, count = set[asyncio.Task[None]](), round(rate * OPEN_S)

        def arrived(number: int, due: float) -> None:
            task = asyncio.create_task(one(number, due))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

        async def run() -> None:
            await arrivals(rate, count, arrived)
            await asyncio.gather(*tasks)
            if len(self._latencies) < count:
                raise RuntimeError(f"only {len(self._latencies)} of {count} decisions came about")

        return await self._measured(name, run)

    def _fresh(self, count: int) -> list[RouteRequest]:
        self._num_runs += 1
        return prompts(100 * len(self.routers) + self._num_runs, count)

    async def give_back(self) -> None:
        routes, self._routes = self._routes, []
        await asyncio.gather(*(router.release(route) for router, route in routes))

    async def _one(self, router: Router, request: RouteRequest, arrived: float, whole: bool) -> None:
        route = await router.choose(request, ())
        self._latencies.append(time.perf_counter() - arrived)
        self._hits.append((route.prefill or route.decode).cached_tokens / request.prompt_tokens)
        if whole:
            task = asyncio.create_task(self._give_back_in_parts(router, route))
            self._giving_back.add(task)
            task.add_done_callback(self._giving_back.discard)
        else:
            self._routes.append((router, route))

    async def _give_back_in_parts(self, router: Router, route: Route) -> None:
        await router.release_prefill(route)
        await router.release(route)

    async def _measured(self, name: str, run: Callable[[], Awaitable[None]]) -> Figures:
        self._latencies, self._hits = [], []
        gc.collect()
        cpu, redis, start = time.process_time(), self._redis.cpu_times(), time.perf_counter()
        await run()
        await asyncio.gather(*self._giving_back)
        seconds, used, after = time.perf_counter() - start, time.process_time() - cpu, self._redis.cpu_times()
        await self.give_back()
        milliseconds = [1000 * latency for latency in self._latencies]
        return Figures(
            name, len(self.routers), len(milliseconds), seconds, used,
            after.user + after.system - redis.user - redis.system, percentile(milliseconds, 50),
            percentile(milliseconds, 99), sum(self._hits) / len(self._hits),
        )  # fmt: skip


@asynccontextmanager
async def routers_on(url: str, count: int, replica: BlockReplica) -> AsyncIterator[list[Router]]:
    registries = [Registry.connect(url) for _ in range(count)]
    views = [ClusterView(registry, stale_after=3600.0) for registry in registries]
    for view in views:
        await view.refresh()
    yield [
        Router(registry, view, replica, MODEL, Disaggregation.AUTO)
        for registry, view in zip(registries, views, strict=True)
    ]
    for registry in registries:
        await registry.close()


async def measure(redis: RedisServer) -> AsyncIterator[Figures]:
    registry = Registry.connect(redis.url)
    replica = BlockReplica(registry.block_feed)
    await replica.refresh()
    gc.collect()
    gc.freeze()  # a million names are not what is measured
    for count in (1, 8):
        async with routers_on(redis.url, count, replica) as routers:
            bench = Bench(routers, redis)
            await bench.closed("warm", whole=True)
            yield await bench.closed("one at a time", whole=False, callers=1)
            yield await bench.closed("closed", whole=False)
            yield await bench.closed("closed, whole", whole=True)
            for rate in OPEN_RATES:
                yield await bench.open(rate)
            if count == 1:
                yield await bench.bare(OPEN_RATES[0], registry)
    problems = (await registry.check_integrity()).violations
    left = sum(worker.reserved_tokens + worker.reserved_blocks for worker in await registry.workers())
    if problems or left:
        raise RuntimeError(f"not everything was released: {problems}, {left}")
    await registry.close()


async def run() -> None:
    with RedisServer.start(max_memory_mb=2048) as redis:
        registry = Registry.connect(redis.url, timeout=10.0)
        await fill(registry)
        await registry.close()
        print(f"Redis holds {psutil.Process(redis.pid).memory_info().rss / 2**20:.0f} MiB")
        memory = []
        for max_blocks in MAX_BLOCKS:
            with ProcessPoolExecutor(1, SPAWN) as other:
                memory.append(other.submit(replica_memory, redis.url, max_blocks).result(timeout=120))
            said = "replica of at most {max_blocks:,}: {blocks:,} blocks, {MiB:.0f} MiB, read in {seconds:.1f} s"
            print(said.format_map(memory[-1]))
        figures = []
        async for found in measure(redis):
            print(found.line(), flush=True)
            figures.append(asdict(found))
    OUT.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps({"replicas": memory, "runs": figures}, indent=2))


if __name__ == "__main__":
    uvloop.run(run())
