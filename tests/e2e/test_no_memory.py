"""A worker that has no memory left, while another of its role has: nobody's request fails for it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import httpx
import psutil
import pytest

from tests.e2e.cluster import BOUND_S, RunningCluster, eventually, running_cluster

pytestmark = pytest.mark.long
REQUESTS, AT_ONCE = 100, 20


def answer(cluster: RunningCluster, number: int) -> tuple[int, str]:
    chance = random.Random(number)
    body: dict[str, object] = {
        "model": "tandem-demo", "prompt": [chance.randrange(1, 4096) for _ in range(chance.choice((20, 300, 900)))],
        "max_tokens": 16, "ignore_eos": True,
    }  # fmt: skip
    if number % 4 == 0:
        body["guided_regex"] = f"[a-z]{{1,{10 + number}}}"
    said = httpx.post(f"{cluster.http}/v1/completions", json=body, timeout=2 * BOUND_S)
    return said.status_code, "" if said.status_code == 200 else said.text


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    options = ["--prefill=2", "--decode=2", "--threads=1", "--disaggregation=require"]
    with running_cluster(tmp_path_factory.mktemp("no-memory"), *options) as cluster:
        yield cluster


@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_its_requests_go_on_elsewhere(cluster: RunningCluster, role: str) -> None:
    eventually(cluster.ready, BOUND_S, "ready")
    limited = psutil.Process(cluster.pids(role)[0])
    # Neither a thread nor an arena more than it has.
    limited.rlimit(psutil.RLIMIT_AS, (limited.memory_info().vms,) * 2)
    with ThreadPoolExecutor(AT_ONCE) as clients:
        answers = list(clients.map(lambda number: answer(cluster, number), range(REQUESTS)))
    assert answers == [(200, "")] * REQUESTS
    with suppress(psutil.NoSuchProcess):  # it may have ended, and there is another already
        limited.kill()
    eventually(lambda: all_linked(cluster), BOUND_S, "every pair has moved a block")


def all_linked(cluster: RunningCluster) -> bool:
    return bool(httpx.get(f"{cluster.http}/health/ready", timeout=BOUND_S).json()["linked_pairs"] == 4)
