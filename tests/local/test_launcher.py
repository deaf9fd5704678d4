"""Services as processes: started again when they end, given up when they keep ending, and gone when stopped."""

from __future__ import annotations

import asyncio
from pathlib import Path

import psutil
import pytest

from tandem.local import LocalLauncher, Service, ServiceFailed, launcher, unless_failed

ENDS = Service("ends", "tests.local.restless", {"kv_memory": 5})
STAYS = Service("stays", "tests.local.restless", {"stay": True})


async def test_what_keeps_ending_is_given_up_with_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TANDEM_KV_MEMORY", "6")
    reports: list[str] = []
    local = LocalLauncher(tmp_path, reports.append)
    await local.start([ENDS])
    with pytest.raises(ServiceFailed, match=r"ends ended with status 3; its last words:\n\['--kv-memory=5'\] \[\]"):
        await asyncio.wait_for(local.watch(restart=True), 60)
    await local.stop()
    assert reports == ["ends ended with status 3; starting it again"] * (launcher.MAX_QUICK_DEATHS - 1)
    assert len((tmp_path / "ends.log").read_text().splitlines()) == launcher.MAX_QUICK_DEATHS


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
        while not (tmp_path / "stays.log").read_text():
            await asyncio.sleep(0.01)
    (started,) = set(psutil.Process().children()) - before
    await local.stop()
    assert reports == ["killing what did not stop in time"]
    assert not started.is_running()
