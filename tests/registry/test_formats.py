"""Releases that would misread each other's keys share a namespace, and each says which others are there."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis.asyncio import Redis
from structlog.testing import capture_logs

from tandem.adapters import AdapterRef
from tandem.local import RedisServer
from tandem.registry import THIS_RELEASE, GatewayAddress, NoWorkers, OtherRelease, Registry, Role
from tandem.registry.named import parse_adapter
from tandem.registry.wire.connection import RedisConnection
from tandem.registry.wire.scripts import FORMAT, key_prefix
from tandem.worker.life.succession import stay, succeed
from tests.registry.cluster import TTL, eventually, register_pool, worker_info, worker_load
from tests.registry.test_select import select
from tests.release import ROOT, last_release, released_files

NEXT = FORMAT + 1
# Registers a worker and a gateway with the code of its own tree, and stays.
OLD_PROCESS = """
import asyncio, sys
from tandem.registry import GatewayAddress, Registry, Role, WorkerInfo, WorkerLoad

async def main(url, namespace):
    registry = Registry.connect(url, namespace=namespace, client_lease_s=5.0)
    sizes = 16, 64, 8, 512, ("tcp",), "here"
    info = WorkerInfo("d0", Role.DECODE, "old", "d0:1", "d0:2", "demo", "r1", "layout", *sizes)
    await registry.register(info, WorkerLoad(64, 0, 0, 0), 60.0)
    registry.announce(GatewayAddress("demo", "g:1", "g:2"), lambda: [])
    await registry.hold_client_lease()

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.fixture
def newer(redis_server: RedisServer, namespace: str) -> Registry:
    """A client of a release with the next format, gateway of nothing."""
    registry = Registry(RedisConnection(redis_server.url, namespace, 30.0, NEXT), 1.0)
    registry.gateways.announce(lambda: (GatewayAddress("demo", "g:1", "g:2"), {}))
    return registry


@pytest.fixture
def older(redis_server: RedisServer, namespace: str, tmp_path: Path) -> Iterator[Path]:
    """A worker and a gateway of the last release run, by the code of the tree that is returned."""
    tree = released_files(tmp_path, "tandem")
    command = [sys.executable, "-c", OLD_PROCESS, redis_server.url, namespace]
    process = subprocess.Popen(command, cwd=tree, env={**os.environ, "PYTHONPATH": str(tree)})
    yield tree
    assert process.poll() is None
    process.kill()
    process.wait(10)


async def test_no_release_routes_to_workers_of_another_format(registry: Registry, newer: Registry) -> None:
    await register_pool(newer)
    with pytest.raises(NoWorkers):
        await select(registry)
    await register_pool(registry)
    await select(registry)
    for one in (registry, newer):
        assert (await one.check_integrity()).violations == ()
    await newer.close()


async def test_each_release_names_the_other(registry: Registry, newer: Registry) -> None:
    assert await registry.releases.others() == await newer.releases.others() == []
    await register_pool(registry)
    (here,) = await newer.releases.others()
    version = re.search(r"Tandem (\S+)", THIS_RELEASE)
    assert version
    assert here == OtherRelease(FORMAT, version[1], 2, 0)
    await register_pool(newer, decode=2)
    (there,) = await registry.releases.others()
    assert (there.format, there.workers, there.gateways) == (NEXT, 3, 0)
    assert THIS_RELEASE in str(there)
    assert f"registry format {NEXT}" in str(there)
    await newer.close()


async def test_a_worker_waits_for_gateways_of_another_release_to_go(registry: Registry, newer: Registry) -> None:
    async with asyncio.timeout(20):
        await succeed(registry)  # at once: there are none
    serving = asyncio.create_task(newer.gateways.hold())
    await eventually(lambda: has_gateways(registry), "the other gateway has a lease")
    waiting = asyncio.create_task(succeed(registry))
    _, still = await asyncio.wait({waiting}, timeout=1.5)
    assert still
    serving.cancel()
    await newer.close()
    async with asyncio.timeout(20):
        await waiting


async def test_a_worker_waits_no_longer_than_its_bound_and_says_what_follows(
    registry: Registry, newer: Registry
) -> None:
    serving = asyncio.create_task(newer.gateways.hold())
    await eventually(lambda: has_gateways(registry), "the other gateway has a lease")
    with capture_logs() as logs:
        async with asyncio.timeout(20):
            await succeed(registry, wait_s=1.0)
    assert [(line["log_level"], line.get("at_most_s"), line.get("waited_s")) for line in logs] == [
        ("warning", 1.0, None),
        ("error", None, 1.0),
    ]
    assert "leave them with none" in logs[-1]["event"]
    serving.cancel()
    await newer.close()


async def test_a_worker_that_goes_while_another_release_comes_stays_for_gateways_of_its_own(
    registry: Registry, newer: Registry
) -> None:
    serving = asyncio.create_task(newer.gateways.hold())
    await eventually(lambda: has_gateways(registry), "the gateway has a lease")
    async with asyncio.timeout(20):
        await stay(newer, 60.0)  # at once: no other release is here
        await register_pool(registry)
        await stay(registry, 60.0)  # at once: it has no gateway
    staying = asyncio.create_task(stay(newer, 60.0))
    _, still = await asyncio.wait({staying}, timeout=1.5)
    assert still
    await stay(newer, 0.5)  # and no longer than its bound
    serving.cancel()
    async with asyncio.timeout(20):
        await staying
    await newer.close()


async def has_gateways(registry: Registry) -> bool:
    return any(other.gateways for other in await registry.releases.others())


async def test_the_first_worker_finds_the_adapters_of_the_release_before(registry: Registry, newer: Registry) -> None:
    await register_pool(registry)
    await registry.adapters.put("a", AdapterRef("a", "/a", "r", "demo"))
    assert (await newer.adapters.all()).by_name == {}
    await register_pool(newer)
    assert (await newer.adapters.all()).by_name == {"a": AdapterRef("a", "/a", "r", "demo")}
    await newer.adapters.drop("a")
    await newer.leases.register(worker_info("d9", Role.DECODE), worker_load(), TTL)
    assert (await newer.adapters.all()).by_name == {}
    await newer.close()


def test_what_a_newer_release_says_more_is_not_read() -> None:
    assert GatewayAddress.of('{"model": "m", "http": "h", "grpc": "g", "more": 1}') == GatewayAddress("m", "h", "g")
    assert parse_adapter("a", '["/a", "r", "m", 1]') == AdapterRef("a", "/a", "r", "m")


async def test_a_worker_that_says_no_number_of_ranks_has_one(registry: Registry, redis: Redis, namespace: str) -> None:
    await registry.leases.register(worker_info("d0", Role.DECODE, tensor_parallel=4), worker_load(), TTL)
    (worker,) = await registry.workers()
    assert (worker.info.tensor_parallel, worker.info.title) == (4, "d0 (TP 4)")
    assert await redis.hdel(f"{key_prefix(namespace)}worker:d0", "tensor_parallel") == 1
    (worker,) = await registry.workers()
    assert (worker.info.tensor_parallel, worker.info.title) == (1, "d0")


async def test_the_last_release_is_left_alone_or_understood(
    registry: Registry, redis: Redis, namespace: str, older: Path
) -> None:
    """Its format says which of both; rows that changed have another."""
    version, _ = last_release()
    number = format_of(older)
    if number == FORMAT:
        await eventually(lambda: has_workers(registry), "the older worker is here")
        assert (await select(registry, prefill="never")).decode.info.worker_id == "d0"
        return
    await eventually(lambda: has_gateways(registry), "the older gateway has a lease")
    assert await registry.releases.others() == [OtherRelease(number, version, 1, 1)]
    rows = f"{key_prefix(namespace) if number > 1 else f'{{{namespace}}}:'}rows:decode:demo"
    before = await redis.strlen(rows)
    assert before
    await register_pool(registry)
    await registry.sweep()
    assert await redis.strlen(rows) == before
    assert {w.info.worker_id for w in await registry.workers()} == {"p0", "d0"}


async def has_workers(registry: Registry) -> bool:
    return bool(await registry.workers())


def test_what_changed_since_the_last_release_has_another_format(tmp_path: Path) -> None:
    """Rows, names of keys, and protos between processes."""
    tree = released_files(tmp_path, "tandem/registry", "protos")
    assert format_of(tree) <= FORMAT
    if format_of(tree) == FORMAT:
        assert layout_of(ROOT) == layout_of(tree)
        against = [str(Path(sys.executable).with_name("buf")), "breaking", "--against", str(tree / "protos")]
        broken = subprocess.run([*against, "protos"], cwd=ROOT, capture_output=True, encoding="utf-8", timeout=60)
        assert not broken.returncode, broken.stdout


def format_of(tree: Path) -> int:
    """0.1.0 had none, which is the first."""
    (scripts,) = (tree / "tandem/registry").rglob("scripts.py")
    found = re.search(r"^FORMAT = (\d+)$", scripts.read_text(encoding="utf-8"), re.MULTILINE)
    return int(found[1]) if found else 1


def layout_of(tree: Path) -> list[str]:
    """Rows and keys, as their scripts say it."""
    rows, keys = ((tree / f"tandem/registry/lua/{name}.lua").read_text(encoding="utf-8") for name in ("rows", "keys"))
    constants = re.findall(r"^local [A-Z_]+(?:, [A-Z_]+)* = [^{].*$", rows, re.MULTILINE)
    return [*constants, *re.findall(r"^--   (\S+)  +(?:sorted set|hash|string|list|set|stream)", keys, re.MULTILINE)]
