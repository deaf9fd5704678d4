"""Workers that live and do nothing: one is stopped while its KV is under way, another does not come to a step's end.

Null engines. Prompts take so long to prefill that a stopped worker is in the middle of many; each decode step of the
worker `stuck` takes a minute, and its watchdog ends it after 0.3 s.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import httpx
import pytest

from tandem.engine import EngineConfig, Request, SamplingParams, StepTime
from tandem.registry import Registry
from tests.e2e.cluster import BOUND_S, RunningCluster, eventually, running_cluster
from tests.e2e.test_migration import Answers, asked, service, undisturbed

pytestmark = pytest.mark.long
CLUSTER = """
models: [{{{{id: m, name: "null", weights: {{{{path: {model}}}}}}}}}]
workers: {{{{settings: {{{{engine: "null", kv_memory: 8MiB}}}}}}}}
pools:
- {{{{name: p, role: prefill, model: m, replicas: 2,
    settings: {{{{null_step: {{{{prefill_tokens_per_s: 500}}}}, max_num_batched_tokens: 64}}}}}}}}
- {{{{name: d, role: decode, model: m}}}}
- {{{{name: stuck, role: decode, model: m, settings: {{{{null_step: {{{{decode_step_s: 60}}}}, max_step_s: 0.3}}}}}}}}
gateway: {{{{settings: {{{{http_port: {{http}}, grpc_port: {{grpc}}, disaggregation: require}}}}}}}}
redis: {{{{port: {{redis}}}}}}
"""
# Each decode step of one of two takes a minute, which ends it after a while.
SLOW = """
models: [{{{{id: m, name: "null", weights: {{{{path: {model}}}}}}}}}]
workers: {{{{settings: {{{{engine: "null", kv_memory: 8MiB}}}}}}}}
pools:
- {{{{name: d, role: decode, model: m}}}}
- {{{{name: stuck, role: decode, model: m, settings: {{{{null_step: {{{{decode_step_s: 60}}}}, max_step_s: 4}}}}}}}}
gateway: {{{{settings: {{{{http_port: {{http}}, grpc_port: {{grpc}}, disaggregation: prefer}}}}}}}}
redis: {{{{port: {{redis}}}}}}
"""
PROMPTS, PROMPT_TOKENS = 8, 300


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, demo_model: Path) -> Iterator[RunningCluster]:
    with running_cluster(tmp_path_factory.mktemp("half-dead"), file=CLUSTER.format(model=demo_model)) as cluster:
        yield cluster


def oracle(model: Path) -> EngineConfig:
    return EngineConfig(model, "null", num_blocks=4096, null=StepTime(speedup=1e6))


def long_prompts() -> list[Request]:
    return [
        Request(f"p{i}", [i + 1] * PROMPT_TOKENS, SamplingParams(max_tokens=8, temperature=1.0, seed=i))
        for i in range(PROMPTS)
    ]


async def test_a_worker_stuck_in_a_step_ends_by_its_watchdog_and_loses_nothing(
    fleet: RunningCluster, demo_model: Path
) -> None:
    requests = asked(40, 20)
    async with service(fleet) as stub:
        answers = Answers(stub, "null", requests)
        assert await answers.all() == undisturbed(oracle(demo_model), requests)
    assert answers.migrated
    log = fleet.logs / "stuck-0.log"
    eventually(
        lambda: "max_step_s: an engine step is not over after" in log.read_text(encoding="utf-8"),
        BOUND_S,
        "it says why it ended",
    )


async def test_a_stuck_worker_gets_nothing_new_while_another_is_there(tmp_path: Path, demo_model: Path) -> None:
    """Requests it had before anyone could know go on elsewhere when its watchdog ends it."""
    first, then = asked(8, 20), asked(40, 20)
    with running_cluster(tmp_path, file=SLOW.format(model=demo_model)) as cluster:
        async with service(cluster) as stub:
            caught = Answers(stub, "null", first)
            begun = time.time()
            await known_as_stuck(cluster)
            known_s = time.time() - begun
            answers = Answers(stub, "null", then)
            async with asyncio.timeout(90):
                whole = await answers.all()
            answered_s = time.time() - begun
            assert await caught.all() == undisturbed(oracle(demo_model), first)
        assert whole == undisturbed(oracle(demo_model), then)
        assert not answers.migrated
        assert caught.migrated
        print(f"known after {known_s:.1f} s, others answered after {answered_s:.1f} s")


async def test_a_prefill_worker_stopped_in_mid_transfer_holds_nothing_up(
    fleet: RunningCluster, demo_model: Path
) -> None:
    """It is noticed, and all is answered while it still stands; what it does when it goes on hurts nobody."""
    eventually(lambda: linked_pairs(fleet) == 4, BOUND_S, "every pair is linked")
    stopped, requests = fleet.pids("prefill")[0], long_prompts()
    async with service(fleet) as stub:
        answers = Answers(stub, "null", requests)
        await answers.begun()  # a first one: both are reading others, each for half a second at least
        os.kill(stopped, signal.SIGSTOP)
        stopped_at = time.time()
        try:
            async with asyncio.timeout(90):
                whole = await answers.all()
            answered_s = time.time() - stopped_at
            eventually(
                lambda: bool(lost_streams(fleet, stopped_at)), BOUND_S, "the gateway says that it lost the worker"
            )
        finally:
            os.kill(stopped, signal.SIGCONT)
        noticed_s = min(lost_streams(fleet, stopped_at)) - stopped_at
        print(f"noticed {noticed_s:.2f} s, all answered {answered_s:.2f} s after the stop")
        assert whole == undisturbed(oracle(demo_model), requests)
        assert any("; after " in last.path.reason for last in answers.last)
        again = Answers(stub, "null", requests)
        assert await again.all() == whole


async def known_as_stuck(cluster: RunningCluster) -> None:
    """Until the registry knows that a worker is."""
    registry = Registry.connect(cluster.redis_url, timeout=BOUND_S)
    async with asyncio.timeout(BOUND_S):
        while not any(worker.load.stuck for worker in await registry.workers()):
            await asyncio.sleep(0.02)
    await registry.close()


def lost_streams(cluster: RunningCluster, since: float) -> list[float]:
    """When the gateway has lost streams to prefill workers."""
    (log,) = cluster.logs.glob("gateway*.log")
    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines() if '"stream ended"' in line]
    ended = [datetime.fromisoformat(line["timestamp"]).timestamp() for line in lines if line["worker"].startswith("p")]
    return [moment for moment in ended if moment >= since]


def linked_pairs(cluster: RunningCluster) -> int:
    return int(httpx.get(f"{cluster.http}/health/ready").json()["linked_pairs"])
