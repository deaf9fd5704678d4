"""Services as processes: started again when they end, given up when they keep ending, and gone when stopped."""

from __future__ import annotations

import asyncio
from pathlib import Path

import psutil
import pytest

from tandem.cluster import Service
from tandem.local import LocalLauncher, ServiceFailed, launcher, unless_failed

ENDS = Service("ends", "tests.local.restless", {"kv_memory": 5})
CHATTERS = Service("chatters", "tests.local.restless", {"chatter": True})
STAYS = Service("stays", "tests.local.restless", {"stay": True})


async def test_what_keeps_ending_is_started_later_each_time_and_ends_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TANDEM_KV_MEMORY", "6")
    monkeypatch.setattr(launcher, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(launcher, "MAX_PAUSE_S", 0.02)
    reports: list[str] = []
    local = LocalLauncher(tmp_path, reports.append)
    before = set(psutil.Process().children())
    await local.start([STAYS, ENDS])
    watching = asyncio.create_task(local.watch(restart=True))
    async with asyncio.timeout(60):
        while len(reports) < 5:
            await asyncio.sleep(0.01)
    again = "ends ended with status 3; starting it again"
    assert reports[:5] == [again, f"{again} in 0.01 s", *3 * [f"{again} in 0.02 s"]]
    assert not watching.done()
    watching.cancel()
    assert "stays" in local.loading()
    monkeypatch.setattr(launcher, "STOP_WAIT_S", 0.2)
    await local.stop()
    assert set(psutil.Process().children()) == before
    assert set((tmp_path / "ends.log").read_text(encoding="utf-8").splitlines()) == {"['--kv-memory=5'] []"}


def test_it_keeps_being_started_again_after_hours(tmp_path: Path) -> None:
    process = launcher._Process(ENDS, tmp_path / "ends.log", print)
    process._quick_deaths = 5000
    assert process.pause_s == launcher.MAX_PAUSE_S


async def test_what_waits_to_be_started_again_does_not_hold_up_the_end(tmp_path: Path) -> None:
    reports: list[str] = []
    local = LocalLauncher(tmp_path, reports.append)
    await local.start([ENDS])
    watching = asyncio.create_task(local.watch(restart=True))
    async with asyncio.timeout(60):
        while not any("in " in report.partition("again")[2] for report in reports):
            await asyncio.sleep(0.01)
    watching.cancel()
    async with asyncio.timeout(launcher.STOP_WAIT_S / 2):
        await local.stop()


async def test_before_all_is_ready_an_end_is_the_end(tmp_path: Path) -> None:
    local = LocalLauncher(tmp_path, print)
    await local.start([ENDS])
    with pytest.raises(ServiceFailed):
        await unless_failed(local, asyncio.sleep(60))
    assert await unless_failed(local, asyncio.sleep(0, "done")) == "done"
    await local.stop()


async def test_what_does_not_want_to_stop_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "STOP_WAIT_S", 0.2)
    reports: list[str] = []
    local = LocalLauncher(tmp_path, reports.append)
    before = set(psutil.Process().children())
    await local.start([STAYS])
    async with asyncio.timeout(60):
        while not (tmp_path / "stays.log").read_text(encoding="utf-8"):
            await asyncio.sleep(0.01)
    (started,) = set(psutil.Process().children()) - before
    await local.stop()
    assert reports == ["killing what did not stop in time"]
    assert not started.is_running()


async def test_a_log_that_takes_no_more_ends_nothing(tmp_path: Path) -> None:
    """Nor does a terminal that is gone, a line without end, or one that only looks like ours."""
    (tmp_path / "chatters.log").symlink_to("/dev/full")
    reports: list[str] = []

    def report(text: str) -> None:
        reports.append(text)
        raise BrokenPipeError

    local = LocalLauncher(tmp_path, report)
    await local.start([CHATTERS])
    watching = asyncio.create_task(local.watch(restart=True))
    async with asyncio.timeout(60):
        while len(reports) < 2:
            await asyncio.sleep(0.01)
    assert not watching.done()
    assert reports[0] == "chatters ended with status 3; starting it again"
    assert local.loading() == {"chatters": (3, 4)}
    watching.cancel()
    await local.stop()
