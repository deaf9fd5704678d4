"""A real cluster for a test: `tandem up` on free ports, as a user would start it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import psutil

from tandem.commands.clusters import REDIS_URL_FILE
from tandem.hosts import address
from tandem.local import free_ports
from tandem.process.child_process import dying_with_parent

# By far longer than it takes on any machine.
START_BOUND_S = 200.0
STOP_BOUND_S = 90.0
BOUND_S = 60.0


def eventually(check: Callable[[], bool], within_s: float, what: str) -> float:
    """Waits until `check()` holds; returns how long that took."""
    start = time.monotonic()
    while time.monotonic() - start < within_s:
        if check():
            return time.monotonic() - start
        time.sleep(0.02)
    raise AssertionError(f"not within {within_s} s: {what}")


@dataclass(frozen=True, slots=True)
class RunningCluster:
    http: str
    grpc: str
    redis_url: str
    logs: Path
    process: subprocess.Popen[str]

    def pids(self, service: str) -> list[int]:
        """Process ids of a service's processes, such as "decode"."""
        return [child.pid for child in psutil.Process(self.process.pid).children() if runs(child, service)]

    def ready(self) -> bool:
        try:
            return httpx.get(f"{self.http}/health/ready", timeout=10.0).status_code == 200
        except httpx.TransportError:
            return False


def metric(address: str, name: str) -> float:
    """Sum of a metric's values at an http address."""
    lines = httpx.get(f"{address}/metrics", timeout=BOUND_S).text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name}{{"))


def runs(process: psutil.Process, service: str) -> bool:
    try:
        return f"services.{service}" in process.cmdline()
    except psutil.NoSuchProcess:  # a zombie, too
        return False


@contextmanager
def running_cluster(
    folder: Path, *options: str, env: dict[str, str] | None = None, file: str = "", host: str = "127.0.0.1",
    before: Sequence[str] = (),
) -> Iterator[RunningCluster]:  # fmt: skip
    """Starts `tandem up`, behind the words `before`, whose gateway is asked at `host`.

    `file`: a cluster.yaml with {http}, {grpc} and {redis} in the places of ports, instead of options.
    """
    http, grpc, redis = free_ports(3)
    arguments = [f"--http-port={http}", f"--grpc-port={grpc}", f"--redis-port={redis}", f"--logs={folder / 'logs'}"]
    if file:
        (folder / "cluster.yaml").write_text(file.format(http=http, grpc=grpc, redis=redis), encoding="utf-8")
        arguments = [f"--file={folder / 'cluster.yaml'}", f"--logs={folder / 'logs'}"]
    output = (folder / "up.log").open("w+", encoding="utf-8")
    process = subprocess.Popen(
        [*before, *dying_with_parent(sys.executable, "-m", "tandem", "up", *arguments, *options)],
        stdout=output, stderr=subprocess.STDOUT, encoding="utf-8", env=os.environ | (env or {}),
    )  # fmt: skip
    cluster = RunningCluster(
        f"http://{address(host, http)}", address(host, grpc), f"redis://127.0.0.1:{redis}", folder / "logs", process
    )
    try:
        said = folder / "up.log"
        eventually(
            lambda: "is ready" in said.read_text(encoding="utf-8") or process.poll() is not None,
            START_BOUND_S,
            "cluster ready",
        )
        assert process.poll() is None, said.read_text(encoding="utf-8")
        url = folder / "logs" / REDIS_URL_FILE
        yield replace(cluster, redis_url=url.read_text(encoding="utf-8")) if url.exists() else cluster
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(STOP_BOUND_S)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        finally:
            output.close()
