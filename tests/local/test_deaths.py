"""A launcher reports services that die: who was computed, and of what they died."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Mapping
from pathlib import Path

import pytest

from tandem.cluster import Service
from tandem.containment import OomKills
from tandem.containment.crash_page import Death
from tandem.liveness.same_host import this_process
from tandem.local import LocalLauncher, RedisServer
from tandem.registry import Registry, Role, report_death
from tests.registry.cluster import worker_info, worker_load


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGKILL])
async def test_a_service_that_dies_is_told_of_before_it_is_started_again(
    tmp_path: Path, number: signal.Signals
) -> None:
    with RedisServer.start() as redis:
        registry = Registry.connect(redis.url, timeout=30.0)
        settings = {"crash_dir": tmp_path / "crashes", "worker_id": "d/0", "redis_url": redis.url, "dies": number.value}
        told: list[Death | None] = []

        async def on_death(settings: Mapping[str, object], cause: str) -> None:
            assert cause == number.name
            told.append(await report_death(settings, cause))

        launcher = LocalLauncher(tmp_path, print, on_death)
        await launcher.start([Service("dies", "tests.local.dying", settings)])
        watching = asyncio.create_task(launcher.watch(restart=True))
        async with asyncio.timeout(60):
            while len(told) < 2:
                await asyncio.sleep(0.01)
        watching.cancel()
        await launcher.stop()
        first, second = told[:2]
        assert first is not None
        assert second is not None
        assert first.incarnation != second.incarnation
        assert first.named == ({"a": 4, "b": 0} if number is signal.SIGSEGV else {})
        assert await registry.death(first.incarnation) == first
        await registry.close()


async def test_the_lease_of_a_service_that_dies_ends_before_it_is_started_again(tmp_path: Path) -> None:
    """Its next start, at another port, registers at once, though the lease had minutes left and there is no page."""
    with RedisServer.start() as redis:
        registry = Registry.connect(redis.url, timeout=30.0)
        settings = {"worker_id": "d0", "redis_url": redis.url, "dies": signal.SIGKILL.value}
        live: list[list[str]] = []

        async def on_death(settings: Mapping[str, object], cause: str) -> None:
            await report_death(settings, cause)
            live.append([worker.info.incarnation for worker in await registry.workers()])

        launcher = LocalLauncher(tmp_path, print, on_death)
        await launcher.start([Service("dies", "tests.local.dying", settings)])
        watching = asyncio.create_task(launcher.watch(restart=True))
        async with asyncio.timeout(60):
            while len(live) < 2:
                await asyncio.sleep(0.01)
        watching.cancel()
        await launcher.stop()
        assert live[:2] == [[], []]
        assert b"WorkerIdTaken" not in (tmp_path / "dies.log").read_bytes()
        await registry.close()


async def test_who_lives_keeps_its_lease_when_another_of_its_name_dies() -> None:
    with RedisServer.start() as redis:
        registry = Registry.connect(redis.url, timeout=30.0)
        lives = worker_info("d0", Role.DECODE, process=this_process())
        await registry.leases.register(lives, worker_load(), 30.0)
        await report_death({"worker_id": "d0", "redis_url": redis.url}, "SIGKILL")
        assert [worker.info for worker in await registry.workers()] == [lives]
        await registry.close()


async def test_what_has_no_page_is_no_error(tmp_path: Path) -> None:
    settings = {"crash_dir": tmp_path, "worker_id": "d0", "redis_url": "redis://127.0.0.1:1"}
    assert await report_death({}, "SIGSEGV") is None
    assert await report_death(settings, "SIGSEGV") is None


def test_a_kill_for_want_of_memory_is_told_from_an_operators() -> None:
    count = 3
    kills = OomKills(lambda: count)
    assert kills.how_it_died(-9) == "SIGKILL"
    count = 4
    assert [kills.how_it_died(status) for status in (-11, -9, -9)] == ["SIGSEGV", "OOM", "SIGKILL"]
    count = 5
    kills.look()
    kills.look()
    assert kills.how_it_died(-9) == "SIGKILL", "that one has ended long ago"
