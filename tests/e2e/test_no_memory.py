"""A worker that has no memory left, while another of its role has: nobody's request fails for it."""

from __future__ import annotations

import random
import resource
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from tests.e2e.cluster import BOUND_S, RunningCluster, eventually, running_cluster

REQUESTS, AT_ONCE = 100, 20


def answer(cluster: RunningCluster, number: int) -> tuple[int, str]:
    chance = random.Random(number)
    body: dict[str, object] = {
        "model": "tandem-demo", "prompt": [chance.randrange(1, 4096) for _ in range(chance.choice((20, 300, 900)))],
        "max_tokens": 16, "ignore_eos": True,
    }  # fmt: skip
    if number % 4 == 0:
        body["guided_regex"] = f"[a-z]{{1,{10 + number}}}"
    said = httpx.post(f"{cluster.http}/v1/completions", json=body, timeout=BOUND_S)
    return said.status_code, "" if said.status_code == 200 else said.text


@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_its_requests_go_on_elsewhere(role: str, tmp_path: Path) -> None:
    options = ["--prefill=2", "--decode=2", "--threads=1", "--disaggregation=require"]
    with running_cluster(tmp_path, *options) as cluster, ThreadPoolExecutor(AT_ONCE) as clients:
        eventually(cluster.ready, BOUND_S, "ready")
        limited = cluster.pids(role)[0]
        # Neither a thread nor an arena more than it has.
        has = psutil.Process(limited).memory_info().vms
        resource.prlimit(limited, resource.RLIMIT_AS, (has, has))
        answers = list(clients.map(lambda number: answer(cluster, number), range(REQUESTS)))
        assert answers == [(200, "")] * REQUESTS
