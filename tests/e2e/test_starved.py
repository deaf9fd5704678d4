"""A cluster on a machine that has many times more to do than it can: late, and nothing fails or is computed twice.

Spinning processes compete for every core with the gateway, the workers and Redis. Null engines, so that what is late is
late for want of a core; all prompts differ, so what the workers computed in all says whether any was computed twice.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread

import psutil
import pytest

from tandem.engine import EngineConfig, Request, SamplingParams, StepTime
from tandem.process.child_process import dying_with_parent
from tests.e2e.cluster import BOUND_S, RunningCluster, eventually, metric, running_cluster
from tests.e2e.test_migration import Answers, all_linked, service, undisturbed

pytestmark = pytest.mark.alone

SPINNERS_A_CORE = 8
STARVED_S = float(os.environ.get("STARVED_S", "12"))
PAUSE_S, RUN_S = 2.5, 1.5
STREAMS, PROMPT_TOKENS, NEW_TOKENS = 16, 24, 40
CLUSTER = """
models: [{{{{id: m, name: "null", weights: {{{{path: {model}}}}}}}}}]
workers: {{{{settings: {{{{engine: "null", kv_memory: 8MiB, null_step: {{{{decode_step_s: 0.02}}}}}}}}}}}}
pools:
- {{{{name: p, role: prefill, model: m}}}}
- {{{{name: d, role: decode, model: m, replicas: {decodes}}}}}
gateway: {{{{settings: {{{{http_port: {{http}}, grpc_port: {{grpc}}, disaggregation: {policy}}}}}}}}}
redis: {{{{port: {{redis}}}}}}
"""


@contextmanager
def starved(cluster: RunningCluster) -> Iterator[None]:
    count = SPINNERS_A_CORE * len(os.sched_getaffinity(0))
    command = dying_with_parent(sys.executable, "-c", "while True: pass")
    # In sessions of their own: the kernel shares cores among sessions, and the cluster is to be starved, not the test.
    spinners = [subprocess.Popen(command, start_new_session=True) for _ in range(count)]
    try:
        yield
    finally:
        for spinner in spinners:
            spinner.kill()
        for spinner in spinners:
            spinner.wait()


@contextmanager
def pausing(cluster: RunningCluster) -> Iterator[None]:
    """As on a machine that seldom runs: the workers, and nobody else, are paused for PAUSE_S again and again."""
    pids, over = cluster.pids("prefill") + cluster.pids("decode"), Event()
    processes = [psutil.Process(pid) for pid in pids]

    def pause() -> None:
        while not over.wait(RUN_S):
            for process in processes:
                process.suspend()
            over.wait(PAUSE_S)
            for process in processes:
                process.resume()

    thread = Thread(target=pause)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@dataclass
class BusyWork:
    asked: list[Request]
    tokens: list[list[int]]
    migrations: float


def requests(wave: int) -> list[Request]:
    """None begins as another does."""
    return [
        Request(
            f"w{wave}-{i}",
            [1 + wave, 1 + i, *range(3, PROMPT_TOKENS + 1)],
            SamplingParams(max_tokens=NEW_TOKENS, temperature=1.0, seed=i),
        )
        for i in range(STREAMS)
    ]


async def worked(cluster: RunningCluster) -> BusyWork:
    """Wave after wave, until the time is over."""
    until, work = time.monotonic() + STARVED_S, BusyWork([], [], 0.0)
    async with service(cluster) as stub:
        while time.monotonic() < until:
            asked = requests(len(work.asked) // STREAMS)
            work.asked += asked
            work.tokens += await Answers(stub, "null", asked).all()
    return work


def computed(logs: Path) -> dict[str, int]:
    """Tokens that all workers have read and written, by what they say as they end."""
    total = {"prefilled": 0, "written": 0}
    for log in logs.glob("[pd]-*.log"):
        for line in map(
            json.loads, filter(lambda line: '"stopped"' in line, log.read_text(encoding="utf-8").splitlines())
        ):
            for kind, count in line["tokens"].items():
                total[kind] += count
    return total


@pytest.mark.parametrize(
    ("hindered", "decodes", "policy"),
    [(starved, 1, "prefer"), (starved, 2, "require"), (pausing, 1, "require")],
)
async def test_nothing_fails_or_is_computed_twice(
    tmp_path: Path, demo_model: Path, decodes: int, policy: str,
    hindered: Callable[[RunningCluster], AbstractContextManager[None]],
) -> None:  # fmt: skip
    file = CLUSTER.format(model=demo_model, decodes=decodes, policy=policy)
    with running_cluster(tmp_path, file=file) as cluster:
        eventually(lambda: all_linked(cluster, decodes), BOUND_S, "every pair is linked")
        with hindered(cluster):
            work = await worked(cluster)
        work.migrations = metric(cluster.http, "tandem_migrations_total")
    total, asked = computed(tmp_path / "logs"), len(work.asked)
    print(f"{asked} answers, {work.migrations:.0f} migrations, {total}, prompts {asked * PROMPT_TOKENS}")
    assert work.tokens == undisturbed(
        EngineConfig(demo_model, "null", num_blocks=4096, null=StepTime(speedup=1e6)), work.asked
    )
    assert work.migrations == 0
    assert total == {"prefilled": asked * PROMPT_TOKENS, "written": asked * (NEW_TOKENS - 1)}
