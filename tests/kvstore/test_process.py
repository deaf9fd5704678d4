"""`python -m services.kvstore` as a process: it serves, keeps its Redis alive, sweeps, and ends in order."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import grpc
import httpx
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from redis import Redis

from tandem.catalogue.metrics import KVSTORE
from tandem.local import RedisServer
from tandem.registry import Registry, Role
from tandem.registry.wire.scripts import key_prefix
from tandem.v1 import process_pb2, process_pb2_grpc
from tests.registry.cluster import worker_info, worker_load

BOUND_S = 60.0
IMPORTS = """
import importlib, pkgutil, sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "cupy", "ray", "numpy"}:
            raise ImportError("blocked: " + name)
sys.meta_path.insert(0, Refuse())
for name in ("services.kvstore", "tandem.registry"):
    package = importlib.import_module(name)
    for module in pkgutil.iter_modules(package.__path__, name + "."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
assert not {"torch", "cupy", "ray"} & set(sys.modules)
try:
    import torch
except ImportError:
    print("blocked")
"""


@dataclass(frozen=True, slots=True)
class RunningKvstore:
    process: subprocess.Popen[bytes]
    log: Path

    def events(self, name: str) -> list[dict[str, object]]:
        lines = [json.loads(line) for line in self.log.read_text(encoding="utf-8").splitlines() if line.startswith("{")]
        return [line for line in lines if line["event"] == name]

    @property
    def redis(self) -> psutil.Process:
        (child,) = psutil.Process(self.process.pid).children()
        return child

    @property
    def redis_url(self) -> str:
        return str(self.events("serving")[0]["redis_url"])


def eventually(check: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + BOUND_S
    while not check():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


@contextmanager
def kvstore(folder: Path, *options: str, **environment: str) -> Iterator[RunningKvstore]:
    path = folder / "kvstore.log"
    with path.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "services.kvstore", "--grpc-port=0", *options],
            stderr=log, env=os.environ | environment,
        )  # fmt: skip
    running = RunningKvstore(process, path)
    try:
        eventually(lambda: running.events("serving") or process.poll() is not None, "serving")
        yield running
    finally:
        process.kill()
        process.wait(BOUND_S)


@contextmanager
def channel(running: RunningKvstore) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(f"127.0.0.1:{running.events('serving')[0]['grpc_port']}") as opened:
        yield opened


def claimed(port: int) -> socket.socket:
    """Listens on the port as soon as the kernel lets go of it: some time after its owner was killed."""
    deadline = time.monotonic() + BOUND_S
    while True:
        try:
            return socket.create_server(("127.0.0.1", port))
        except OSError:
            assert time.monotonic() < deadline, f"port {port} is still taken"
            time.sleep(0.02)


def serving(opened: grpc.Channel) -> bool:
    request = health_pb2.HealthCheckRequest(service="tandem.v1.IntegrityService")
    status = health_pb2_grpc.HealthStub(opened).Check(request, timeout=30).status
    return bool(status == health_pb2.HealthCheckResponse.SERVING)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_serves_with_its_own_redis_and_ends_in_order(tmp_path: Path, number: signal.Signals) -> None:
    with kvstore(tmp_path, "--redis-port=0", REDIS_URL="") as running, channel(running) as opened:
        eventually(lambda: serving(opened), "healthy")
        stub = process_pb2_grpc.IntegrityServiceStub(opened)
        assert not stub.CheckIntegrity(process_pb2.CheckIntegrityRequest(), timeout=30).violations
        reflected = reflection_pb2_grpc.ServerReflectionStub(opened).ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(list_services="")]), timeout=30
        )
        names = {service.name for service in next(reflected).list_services_response.service}
        assert {"tandem.v1.IntegrityService", "grpc.health.v1.Health"} <= names
        redis = running.redis
        running.process.send_signal(number)
        assert running.process.wait(BOUND_S) == 0
        assert not redis.is_running()
        assert running.events("stopped")
        assert "Traceback" not in running.log.read_text(encoding="utf-8")


def test_a_given_redis_is_used_swept_and_left_running(tmp_path: Path, redis_server: RedisServer) -> None:
    with (
        Redis.from_url(redis_server.url, decode_responses=True) as client,
        kvstore(tmp_path, "--namespace=swept", REDIS_URL=redis_server.url) as running,
    ):
        assert not psutil.Process(running.process.pid).children()
        client.hset(key_prefix("swept") + "worker:d0", "incarnation", "old")
        client.zadd(key_prefix("swept") + "leases", {"d0": 1})
        eventually(lambda: not client.exists(key_prefix("swept") + "worker:d0"), "swept")
        running.process.terminate()
        assert running.process.wait(BOUND_S) == 0
        assert client.ping()


def test_what_it_measures(tmp_path: Path, own_redis: RedisServer) -> None:
    with (
        Redis.from_url(own_redis.url, decode_responses=True) as client,
        kvstore(tmp_path, f"--redis-url={own_redis.url}", "--metrics-port=0"),
    ):
        eventually(lambda: client.get(key_prefix("tandem") + "keeper"), "the registry knows where it is read")
        address = client.get(key_prefix("tandem") + "keeper")
        assert set(measured(address)) == {one.exposed_as for one in KVSTORE.values()}
        expected = {"tandem_registry_up": [1.0], "tandem_registry_workers": [1.0], "tandem_redis_deaths_total": [0.0]}
        asyncio.run(register_one(own_redis.url))
        eventually(lambda: expected.items() <= measured(address).items(), "a worker is counted")
        assert measured(address)["tandem_registry_expired_total"] == [0.0, 0.0, 0.0]  # a live lease moves none
        client.zadd(key_prefix("tandem") + "leases", {"d0": 1})
        eventually(lambda: measured(address)["tandem_registry_expired_total"] == [1.0, 0.0, 0.0], "and its end")
        before = measured(address)["tandem_sweep_seconds"][0]
        client.hset(key_prefix("tandem") + "reservation:r0", "tokens", "d1")
        client.zadd(key_prefix("tandem") + "reservations", {"r0": int(time.time() * 1000) + 10**6})
        eventually(lambda: measured(address)["tandem_registry_reservations"] == [1.0], "a reservation is counted")
        client.delete(key_prefix("tandem") + "reservation:r0")
        eventually(lambda: measured(address)["tandem_registry_reservations"] == [0.0], "its end")
        assert measured(address)["tandem_sweep_seconds"][0] > before  # each sweep that Redis answers
        assert httpx.get(f"http://{address}/debug/integrity").json()["whole"]
        own_redis.kill()
        eventually(lambda: measured(address)["tandem_registry_up"] == [0.0], "Redis is gone")


async def register_one(url: str) -> None:
    registry = Registry.connect(url)
    await registry.leases.register(worker_info("d0", Role.DECODE), worker_load(), 1000.0)
    await registry.close()


def measured(address: object) -> dict[str, list[float]]:
    """Values of each metric, of a histogram how many it has."""
    found: dict[str, list[float]] = {}
    for line in httpx.get(f"http://{address}/metrics").text.splitlines():
        name, _, value = line.rpartition(" ")
        name = name.partition("{")[0]
        if not line.startswith("#") and not name.endswith(("_bucket", "_sum", "_created")):
            found.setdefault(name.removesuffix("_count"), []).append(float(value))
    return found


def test_its_redis_is_started_again_when_it_dies(tmp_path: Path) -> None:
    with kvstore(tmp_path, "--redis-port=0", REDIS_URL="") as running, channel(running) as opened:
        eventually(lambda: serving(opened), "healthy")
        dead = running.redis
        dead.kill()
        eventually(lambda: running.events("redis-server died: starting it again, empty"), "noticed")
        children = psutil.Process(running.process.pid).children
        eventually(lambda: children() not in ([], [dead]) and serving(opened), "healthy again")
        with Redis.from_url(running.redis_url) as client:
            assert client.ping()


def test_health_says_whether_redis_answers(tmp_path: Path, own_redis: RedisServer) -> None:
    with kvstore(tmp_path, f"--redis-url={own_redis.url}") as running, channel(running) as opened:
        eventually(lambda: serving(opened), "healthy")
        own_redis.kill()
        eventually(lambda: not serving(opened), "not healthy")
        with RedisServer.start(own_redis.port):
            eventually(lambda: serving(opened), "healthy again")


def test_the_death_of_its_keeper_ends_it_with_the_reason(tmp_path: Path) -> None:
    with kvstore(tmp_path, "--redis-port=0", REDIS_URL="") as running:
        port = urlsplit(running.redis_url).port
        running.process.send_signal(signal.SIGSTOP)
        running.redis.kill()
        with claimed(port or 0):
            running.process.send_signal(signal.SIGCONT)
            assert running.process.wait(BOUND_S) == 1
        assert (
            f"kvstore: redis-server on port {port} did not start"
            in running.log.read_text(encoding="utf-8").splitlines()[-1]
        )


def test_a_taken_grpc_port_is_an_error_that_says_so(tmp_path: Path, redis_server: RedisServer) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with kvstore(tmp_path, f"--redis-url={redis_server.url}", f"--grpc-port={port}") as running:
            assert running.process.wait(BOUND_S) == 1
    assert f"kvstore: cannot listen on 127.0.0.1:{port}" in running.log.read_text(encoding="utf-8")


def test_bad_settings_name_the_field(tmp_path: Path) -> None:
    with kvstore(tmp_path, "--redis-port=-1") as running:
        assert running.process.wait(BOUND_S) == 2
    assert running.log.read_text(encoding="utf-8").startswith("--redis-port:")


def test_no_torch_is_needed() -> None:
    output = subprocess.run([sys.executable, "-c", IMPORTS], check=True, timeout=60, stdout=subprocess.PIPE)
    assert output.stdout == b"blocked\n"
