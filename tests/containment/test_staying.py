"""A sandbox whose forks stay for many calls."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest

from tandem.containment import Bounds, CallDied, CallExhausted, Sandbox
from tests.containment.test_sandbox import SMALL, crash, double, fill, refuse, sleep, spin

CALLS = list[int]()


def note(number: int) -> tuple[int, int]:
    """Returns how many calls this process has noted, and which process it is."""
    CALLS.append(number)
    return len(CALLS), os.getpid()


@pytest.fixture
async def sandbox() -> AsyncIterator[Sandbox]:
    made = Sandbox(preload=(__name__,), stays=True)
    running = asyncio.create_task(made.run())
    yield made
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running


async def process(sandbox: Sandbox) -> int:
    return (await sandbox.call(note, 0))[1]


async def test_a_fork_keeps_what_its_calls_have_cached(sandbox: Sandbox) -> None:
    seen = [await sandbox.call(note, i) for i in range(20)]
    assert len({pid for _, pid in seen}) <= 2, "one a lane"
    assert sum(count == 1 for count, _ in seen) == len({pid for _, pid in seen})
    with pytest.raises(LookupError, match="this"):
        await sandbox.call(refuse, "this")
    assert (await sandbox.call(note, 0))[1] in {pid for _, pid in seen}


async def test_a_call_that_harms_its_fork_is_its_last(sandbox: Sandbox) -> None:
    for harm, what in ((crash, CallDied), (spin, CallExhausted)):
        known = {await process(sandbox) for _ in range(4)}
        with pytest.raises(what):
            await sandbox.call(harm, bounds=SMALL)
        seen = {await process(sandbox) for _ in range(4)}
        assert len(seen - known) <= 1, "the other lane's stays"
    with pytest.raises(CallExhausted, match="memory"):
        await sandbox.call(fill, 100, bounds=SMALL)
    assert await sandbox.call(fill, 50, bounds=SMALL), "memory that the last call has used up is there again"


async def test_each_call_has_its_own_bounds(sandbox: Sandbox) -> None:
    for _ in range(4):
        assert await sandbox.call(fill, 100, bounds=Bounds(memory_bytes=2**28))
        with pytest.raises(CallExhausted, match="memory"):
            await sandbox.call(fill, 100, bounds=SMALL)


async def test_a_call_may_be_the_last_of_its_fork(sandbox: Sandbox) -> None:
    seen = [await sandbox.call(note, 0, bounds=Bounds(is_last=True)) for _ in range(6)]
    assert [count for count, _ in seen] == [1] * 6


async def test_a_caller_has_one_lane_and_leaves_the_other_to_others(sandbox: Sandbox) -> None:
    await sandbox.call(double, 1)
    slow = [asyncio.create_task(sandbox.call(sleep, 0.3, caller="slow")) for _ in range(4)]
    await asyncio.sleep(0)
    assert [await sandbox.call(double, i, caller="quick") for i in range(50)] == [2 * i for i in range(50)]
    assert not any(task.done() for task in slow[1:])
    assert len(set(await asyncio.gather(*slow))) == 1


async def test_it_ends_when_it_is_told_to_while_its_helper_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.containment.sandbox.RESTART_S", 0.0)
    monkeypatch.setattr("tandem.containment.sandbox.START_S", 0.0)
    for delay in range(30):
        running = asyncio.create_task(Sandbox(preload=("no.such.module",)).run())
        await asyncio.sleep(0.01 * delay)
        running.cancel()
        done, _ = await asyncio.wait({running}, timeout=20.0)
        assert done, delay
