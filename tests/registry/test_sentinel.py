"""A registry behind Redis Sentinel, with real sentinels: it follows the master, and never stays with a replica."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from redis.asyncio import Redis

from tandem.local import RedisServer, free_ports
from tandem.process.child_process import dying_with_parent
from tandem.registry import Registry, RegistryUnavailable
from tests.registry.cluster import eventually, register_pool

PASSWORD = "of-redis"
FOR_EVER_MS = 600_000


@dataclass(frozen=True)
class Sentinel:
    process: subprocess.Popen[bytes]
    port: int

    async def ask(self, *command: str | int) -> object:
        async with Redis(port=self.port, decode_responses=True) as client:
            return await client.execute_command("SENTINEL", *command)

    async def answers(self) -> bool:
        try:
            return bool(await self.ask("MASTERS"))
        except OSError:
            return False


Watch = Callable[..., Sentinel]


@pytest.fixture
def watch(tmp_path: Path, master: RedisServer) -> Iterator[Watch]:
    """Starts a sentinel of the server at a port, which it takes for down after that time without an answer."""
    with ExitStack() as started:

        def start(port: int, down_after_ms: int = FOR_EVER_MS) -> Sentinel:
            own = free_ports(1)[0]
            file = tmp_path / f"{own}.conf"
            file.write_text(
                f"port {own}\nbind 127.0.0.1\ndir {tmp_path}\nsentinel monitor tandem 127.0.0.1 {port} 1\n"
                f"sentinel auth-pass tandem {PASSWORD}\nsentinel down-after-milliseconds tandem {down_after_ms}\n",
                encoding="utf-8",
            )
            program = os.readlink(f"/proc/{master.pid}/exe")
            command = dying_with_parent(program, str(file), "--sentinel")
            process = started.enter_context(subprocess.Popen(command, stdout=subprocess.DEVNULL))
            started.callback(process.kill)
            return Sentinel(process, own)

        yield start


@pytest.fixture
def master() -> Iterator[RedisServer]:
    with RedisServer.start(password=PASSWORD) as server:
        yield server


@pytest.fixture
def successor() -> Iterator[RedisServer]:
    with RedisServer.start(password=PASSWORD) as server:
        yield server


@pytest.fixture
async def replica(master: RedisServer, successor: RedisServer) -> RedisServer:
    await follow(successor, master)
    return successor


async def follow(server: RedisServer, master: RedisServer) -> None:
    async with Redis.from_url(server.url) as admin:
        await admin.config_set("masterauth", PASSWORD)
        await admin.replicaof("127.0.0.1", master.port)


def url(*ports: int) -> str:
    return f"redis+sentinel://:{PASSWORD}@{','.join(f'127.0.0.1:{port}' for port in ports)}/tandem/0"


async def works(registry: Registry) -> bool:
    try:
        await register_pool(registry)
    except RegistryUnavailable:
        return False
    return len(await registry.workers()) == 2


async def test_after_a_failover_the_same_registry_works_on_the_new_master(
    master: RedisServer, replica: RedisServer, watch: Watch
) -> None:
    sentinel = watch(master.port, down_after_ms=300)
    registry = Registry.connect(url(free_ports(1)[0], sentinel.port), timeout=30.0)
    await eventually(sentinel.answers, "the sentinel runs")

    async def replica_is_known() -> bool:
        replicas = await sentinel.ask("REPLICAS", "tandem")
        return isinstance(replicas, list) and any(r["master-link-status"] == "ok" for r in replicas)

    await eventually(replica_is_known, "the sentinel knows the replica")
    assert await works(registry)
    master.kill()
    await eventually(lambda: works(registry), "workers register on the new master")
    async with Redis.from_url(replica.url) as client:
        assert (await client.role())[0] == b"master"
        assert await client.dbsize() > 0
    await registry.close()


async def test_a_master_that_became_a_replica_is_left_at_its_first_refusal(
    master: RedisServer, successor: RedisServer, watch: Watch
) -> None:
    sentinel = watch(master.port)
    await eventually(sentinel.answers, "the sentinel runs")
    registry = Registry.connect(url(sentinel.port), timeout=30.0)
    assert await works(registry)
    await follow(master, successor)
    with pytest.raises(RegistryUnavailable, match="READONLY"):
        await register_pool(registry)
    with pytest.raises(RegistryUnavailable, match=f"names 127.0.0.1:{master.port}, which is a replica"):
        await registry.ping()
    await sentinel.ask("REMOVE", "tandem")
    with pytest.raises(RegistryUnavailable, match="knows no master tandem"):
        await registry.ping()
    await sentinel.ask("MONITOR", "tandem", "127.0.0.1", successor.port, 1)
    assert await works(registry)
    await registry.close()


async def test_a_sentinel_behind_the_times_or_without_an_answer_is_passed_over(
    master: RedisServer, replica: RedisServer, watch: Watch
) -> None:
    behind, right = watch(replica.port), watch(master.port)
    for sentinel in (behind, right):
        await eventually(sentinel.answers, "the sentinel runs")
    registry = Registry.connect(url(behind.port, right.port), timeout=30.0)
    assert await works(registry)
    await registry.close()
    behind.process.send_signal(signal.SIGSTOP)
    registry = Registry.connect(url(behind.port, right.port), timeout=0.5)
    with pytest.raises(RegistryUnavailable, match=f"tandem of 127.0.0.1:{behind.port},.*: no answer in 0.5 s"):
        await registry.ping()
    await eventually(lambda: works(registry), "the other sentinel is asked")
    await registry.close()
