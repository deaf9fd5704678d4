"""Every log of a cluster, and the terminal it was started from, on a full disk: it serves, and survives a failover."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tandem.local import free_ports
from tandem.process.child_process import dying_with_parent
from tests.e2e.cluster import BOUND_S, START_BOUND_S, STOP_BOUND_S, RunningCluster, eventually

pytestmark = pytest.mark.long
SERVICES = ("gateway", "kvstore", "prefill-0", "decode-0", "decode-1")
# The launcher reads what services log; here each of them has the full disk itself, too.
UP = """
import asyncio
from tandem.cli import main
spawn = asyncio.create_subprocess_exec
asyncio.create_subprocess_exec = lambda *command, **options: spawn(*command, **options | {"stderr": open("/dev/full")})
main()
"""
ANSWERS = 30


@contextmanager
def cluster_on_a_full_disk(logs: Path) -> Iterator[RunningCluster]:
    http, grpc, redis = free_ports(3)
    options = [f"--http-port={http}", f"--grpc-port={grpc}", f"--redis-port={redis}", f"--logs={logs}"]
    options += ["--engine=null", "--decode=2", "--null-speedup=0.5"]
    logs.mkdir()
    for service in SERVICES:
        (logs / f"{service}.log").symlink_to("/dev/full")
    with Path("/dev/full").open("wb") as full:
        process = subprocess.Popen(
            dying_with_parent(sys.executable, "-c", UP, "up", *options), stdout=full, stderr=full, encoding="utf-8"
        )
    try:
        yield RunningCluster(
            f"http://127.0.0.1:{http}", f"127.0.0.1:{grpc}", f"redis://127.0.0.1:{redis}", logs, process
        )
        assert process.poll() is None
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(STOP_BOUND_S)


def ready(cluster: RunningCluster) -> bool:
    try:
        said = httpx.get(f"{cluster.http}/health/ready", timeout=10.0)
    except httpx.TransportError:
        return False
    return said.status_code == 200 and said.json()["linked_pairs"] == 2


def answer(cluster: RunningCluster) -> int:
    body = {"model": "tandem-demo", "prompt": "import ", "max_tokens": 100, "ignore_eos": True, "seed": 1}
    return httpx.post(f"{cluster.http}/v1/completions", json=body, timeout=BOUND_S).status_code


def test_nothing_is_cut_when_a_decode_worker_dies_and_redis_goes(tmp_path: Path) -> None:
    with cluster_on_a_full_disk(tmp_path / "logs") as cluster, ThreadPoolExecutor(ANSWERS) as clients:
        eventually(lambda: ready(cluster), START_BOUND_S, "ready")
        (gateway,) = cluster.pids("gateway")
        answers = [clients.submit(answer, cluster) for _ in range(ANSWERS)]
        time.sleep(0.5)
        os.kill(cluster.pids("decode")[0], signal.SIGKILL)
        assert [one.result() for one in answers] == [200] * ANSWERS
        eventually(lambda: ready(cluster), BOUND_S, "ready again")
        os.kill(cluster.pids("kvstore")[0], signal.SIGKILL)
        eventually(lambda: ready(cluster), BOUND_S, "ready again")
        assert answer(cluster) == 200
        assert cluster.pids("gateway") == [gateway]
