"""Calls in the helper process: what they return, raise or die of, their bounds, turns, and that nothing is left."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import grpc.aio
import psutil
import pytest
import uvloop
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from tandem.containment.sandbox import CallDied, CallExhausted, Sandbox, SandboxBusy
from tandem.containment.sandboxed import Bounds, MiB

HERE = Path(__file__).parents[2]
SMALL = Bounds(cpu_s=0.3, memory_bytes=64 * MiB)


def double(number: int) -> int:
    return 2 * number


def refuse(what: str) -> None:
    raise LookupError(what)


class TwoArguments(Exception):
    def __init__(self, one: str, two: str) -> None:
        super().__init__(one + two)


def refuse_oddly() -> None:
    raise TwoArguments("one", "two")


def stop() -> None:
    raise StopIteration


def crash() -> None:
    ctypes.string_at(0)


def leave() -> None:
    os._exit(3)


def spin() -> None:
    while True:
        pass


def sleep(seconds: float) -> int:
    time.sleep(seconds)
    return os.getppid()


def fill(mib: int) -> int:
    return len(b"x" * (mib * MiB))


def recurse_in_c(depth: int) -> str:
    nested: tuple = ()
    for _ in range(depth):
        nested = (nested,)
    sys.setrecursionlimit(10**9)
    return str(len(repr(nested)))


def echo(data: bytes) -> bytes:
    return data


def end_the_helper() -> None:
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(10)


def claim_a_huge_reply() -> None:
    _write_to_owner(b"\xff" * 8)


def reply_nonsense() -> None:
    _write_to_owner((9).to_bytes(8) + b"no pickle")


def _write_to_owner(data: bytes) -> None:
    """As memory that was overwritten might: on whichever sockets the fork has."""
    for number in sorted(map(int, os.listdir("/proc/self/fd")))[3:]:
        with suppress(OSError):
            os.write(number, data)
    time.sleep(10)


def environment() -> list[str]:
    return sorted(os.environ)


@pytest.fixture
async def sandbox() -> AsyncIterator[Sandbox]:
    others = psutil.Process().children(recursive=True)  # clusters that test files share
    made = Sandbox(preload=(__name__,))
    running = asyncio.create_task(made.run())
    yield made
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running
    own = [child for child in psutil.Process().children(recursive=True) if child not in others]
    assert not [child for child in own if "tandem.containment" in child.cmdline()]


async def test_a_call_returns_or_raises_what_its_function_does(sandbox: Sandbox) -> None:
    assert await sandbox.call(double, 21) == 42
    with pytest.raises(LookupError, match="this"):
        await sandbox.call(refuse, "this")
    with pytest.raises(RuntimeError, match="TwoArguments: onetwo"):
        await sandbox.call(refuse_oddly)
    with pytest.raises(RuntimeError, match="StopIteration"):
        await sandbox.call(stop)


async def test_large_arguments_and_results_arrive_whole(sandbox: Sandbox) -> None:
    data = os.urandom(16 * MiB)
    assert await sandbox.call(echo, data) == data


async def test_a_call_that_crashes_names_its_signal_and_ends_nobody_else(sandbox: Sandbox) -> None:
    beside = asyncio.create_task(sandbox.call(sleep, 0.5))
    for _ in range(5):
        with pytest.raises(CallDied) as died:
            await sandbox.call(crash, caller="another")
        assert died.value.how == "SIGSEGV"
    with pytest.raises(CallDied, match="exit status 3"):
        await sandbox.call(leave, caller="another")
    assert await beside == sandbox.pid, "served by a fork of the same helper"


async def test_time_memory_and_stack_are_bounded(sandbox: Sandbox) -> None:
    with pytest.raises(CallExhausted) as exhausted:
        await sandbox.call(spin, bounds=SMALL)
    assert exhausted.value.what == "CPU time"
    with pytest.raises(CallExhausted) as exhausted:
        await sandbox.call(fill, 100, bounds=SMALL)
    assert exhausted.value.what == "memory"
    assert await sandbox.call(fill, 32, bounds=SMALL) == 32 * MiB
    with pytest.raises(SandboxBusy):
        await sandbox.call(sleep, 60, bounds=Bounds(wall_s=0.2))


async def test_the_stack_is_as_large_as_asked_for(sandbox: Sandbox) -> None:
    assert await sandbox.call(recurse_in_c, 20_000, bounds=Bounds(stack_bytes=32 * MiB)) == "60002"
    with pytest.raises(CallDied, match="SIGSEGV"):
        await sandbox.call(recurse_in_c, 20_000, bounds=Bounds(stack_bytes=MiB))


async def test_callers_take_turns(sandbox: Sandbox) -> None:
    ended: list[str] = []

    async def call(caller: str) -> None:
        await sandbox.call(sleep, 0.1, caller=caller)
        ended.append(caller)

    await sandbox.call(double, 1)
    many = [asyncio.create_task(call("many")) for _ in range(20)]
    await asyncio.sleep(0)
    await call("one")
    assert len(ended) <= 5, "behind those that ran already, and one more turn"
    await asyncio.gather(*many)


async def helper(sandbox: Sandbox) -> psutil.Process:
    return psutil.Process(await sandbox.call(sleep, 0))


async def test_a_lost_helpers_calls_are_run_by_the_next(sandbox: Sandbox) -> None:
    lost = await helper(sandbox)
    calls = [asyncio.create_task(sandbox.call(sleep, 1, caller=str(number))) for number in range(4)]
    await asyncio.sleep(0.2)
    lost.kill()
    async with asyncio.timeout(60):
        served_by = set(await asyncio.gather(*calls))
    assert len(served_by) == 1
    assert lost.pid not in served_by


async def test_a_call_under_way_in_two_lost_helpers_is_refused(sandbox: Sandbox) -> None:
    call = asyncio.create_task(sandbox.call(end_the_helper))
    with pytest.raises(SandboxBusy, match="lost"):
        await call
    assert await sandbox.call(double, 2) == 4


async def test_a_helper_that_is_found_dead_is_lost_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a call, before its end is noticed: no other lane of it takes that call."""
    monkeypatch.setattr("tandem.containment.sandbox._notice_death", lambda ended: asyncio.sleep(3600))
    sandbox = Sandbox()
    running = asyncio.create_task(sandbox.run())
    lost = await helper(sandbox)
    lost.kill()
    async with asyncio.timeout(60):
        while psutil.pid_exists(lost.pid):
            await asyncio.sleep(0.01)
    assert await sandbox.call(double, 2) == 4
    running.cancel()
    await asyncio.wait([running])


def test_a_helper_starts_beside_grpcs_calls_under_uvloop() -> None:
    """As in a gateway. Of 100 that were forked, about 17 died before they began."""
    code = f"from {__name__} import start_many; start_many()"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=HERE, capture_output=True, encoding="utf-8", timeout=120, check=False
    )
    assert (done.returncode, done.stdout) == (0, "all alive\n"), done.stderr[-2000:]


def start_many(times: int = 60) -> None:
    async def run() -> None:
        server = grpc.aio.server()
        health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            calls = [asyncio.create_task(call_for_ever(health_pb2_grpc.HealthStub(channel))) for _ in range(4)]
            for _ in range(times):
                async with Sandbox()._helper() as (ended, _lanes):
                    await asyncio.sleep(0.01)
                    assert not ended.done(), f"it ended: {ended.result()}"
            for call in calls:
                call.cancel()
        await server.stop(None)

    uvloop.run(run())
    print("all alive")


async def call_for_ever(stub: health_pb2_grpc.HealthStub) -> None:
    while True:
        await stub.Check(health_pb2.HealthCheckRequest())


async def test_an_idle_helpers_death_costs_no_call(sandbox: Sandbox) -> None:
    lost = await helper(sandbox)
    lost.kill()
    async with asyncio.timeout(60):
        while sandbox.pid == lost.pid:
            await asyncio.sleep(0.05)
    assert (await helper(sandbox)).pid == sandbox.pid


async def test_forks_that_die_while_they_wait_answer_nobody(sandbox: Sandbox) -> None:
    """As where memory is short: the kernel takes them first. No later call gets an earlier one's answer."""
    for round_ in range(3):
        for fork in (await helper(sandbox)).children():
            with suppress(psutil.NoSuchProcess):
                fork.kill()
        async with asyncio.timeout(60):
            assert await asyncio.gather(*(sandbox.call(double, round_ + n) for n in range(8))) == [
                2 * (round_ + n) for n in range(8)
            ]


async def test_what_is_no_reply_ends_the_helper_alone(sandbox: Sandbox) -> None:
    for write in (claim_a_huge_reply, reply_nonsense):
        with pytest.raises(SandboxBusy, match="lost"):
            await sandbox.call(write)
        assert await sandbox.call(double, 3) == 6


async def test_who_waits_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.containment.sandbox.WAIT_S", 0.05)
    with pytest.raises(SandboxBusy, match="no lane"):
        await Sandbox().call(double, 1)


async def test_a_cancelled_caller_leaves_its_lane_to_others(sandbox: Sandbox) -> None:
    gone = [asyncio.create_task(sandbox.call(sleep, 0.2)) for _ in range(4)]
    await asyncio.sleep(0.1)
    for task in gone:
        task.cancel()
    assert await sandbox.call(double, 3) == 6


async def test_calls_see_nothing_of_the_owners_secrets(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_CLUSTER_SECRET", "x")
    assert "TANDEM_CLUSTER_SECRET" not in await sandbox.call(environment)


OWNER = """
import asyncio, uvloop
from tandem.containment.sandbox import Sandbox
from tests.containment.test_sandbox import sleep, spin
async def main():
    sandbox = Sandbox()  # under the loop that the gateway has
    running = asyncio.create_task(sandbox.run())
    print(await sandbox.call(sleep, 0), flush=True)
    await sandbox.call(spin)
uvloop.run(main())
"""


def test_nothing_outlives_an_owner_that_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", OWNER], cwd=HERE, stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        helper = psutil.Process(int(owner.stdout.readline()))
        family = [helper, *helper.children(recursive=True)]
        assert len(family) >= 2
        owner.kill()
        _, alive = psutil.wait_procs(family, timeout=10)
        assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []
