"""A worker's crashes as its next start tells of them, and suspects that wait for their turn."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from tandem.containment.crash_page import Death
from tandem.local import RedisServer
from tandem.registry import Registry
from tandem.v1 import worker_pb2
from tandem.worker import SequenceFailed, SuspectTurns
from tandem.worker.life.crash import cause_in

START = """
import ctypes, os, signal, sys
from pathlib import Path
from services.decode.settings import DecodeSettings
from tandem.containment import oom_kills_here
from tandem.worker.life.crash import open_crash_page
folder, url, number, killed = sys.argv[1:]
settings = DecodeSettings(model_path=Path("."), crash_dir=Path(folder), redis_url=url)
page = open_crash_page(settings, "d0")
page.begin(f"before {number}")
if number == "9":
    page.note_oom_kills(oom_kills_here() - int(killed))
page.enter("a", 4)
page.stepping()
if number == "11":
    ctypes.string_at(0)
os.kill(os.getpid(), int(number))
"""


def start(folder: Path, url: str, number: int, oom_kills: int = 0) -> None:
    """`oom_kills`: as many are counted between its last look and its end."""
    arguments = [sys.executable, "-c", START, str(folder), url, str(number), str(oom_kills)]
    assert subprocess.run(arguments, check=False, timeout=120).returncode == -number


async def test_the_next_start_tells_of_a_crash(tmp_path: Path) -> None:
    with RedisServer.start() as redis:
        for number in (11, 6, 9, 15):
            await asyncio.to_thread(start, tmp_path, redis.url, number)
        registry = Registry.connect(redis.url, timeout=30.0)
        assert await registry.death("before 11") == Death("before 11", "SIGSEGV", {"a": 4})
        assert await registry.death("before 6") == Death("before 6", "SIGABRT", {"a": 4})
        assert await registry.death("before 9") == Death("before 9", "", {})
        assert await registry.death("before 15") is None
        await registry.close()


async def test_the_next_start_tells_of_a_kill_for_want_of_memory(tmp_path: Path) -> None:
    with RedisServer.start() as redis:
        for number, oom_kills in ((9, 1), (15, 0)):
            await asyncio.to_thread(start, tmp_path, redis.url, number, oom_kills)
        registry = Registry.connect(redis.url, timeout=30.0)
        assert await registry.death("before 9") == Death("before 9", "OOM", {"a": 4})
        await registry.close()


@pytest.mark.parametrize(
    ("said", "cause"),
    [
        ("", ""), ("nothing of it", ""), ("Fatal Python error: Bus error\n\nCurrent thread", "SIGBUS"),
        ("Fatal Python error: xyz\nFatal Python error: Aborted\n", "SIGABRT"),
    ],
)  # fmt: skip
def test_causes(said: str, cause: str) -> None:
    assert cause_in(said) == cause


OVERFLOW = """
import ctypes, faulthandler, sys, threading
from tandem.worker.engine.fault_stack import own_fault_stack
faulthandler.enable(open(sys.argv[1], "w"))
again = ctypes.CFUNCTYPE(None)(lambda: again())
def run():
    sys.setrecursionlimit(10**9)
    with own_fault_stack():
        again()
threading.stack_size(1 << 20)
thread = threading.Thread(target=run)
thread.start()
thread.join()
"""


def test_a_thread_whose_stack_has_run_out_says_so(tmp_path: Path) -> None:
    said = tmp_path / "said"
    arguments = [sys.executable, "-c", OVERFLOW, str(said)]
    assert subprocess.run(arguments, check=False, timeout=60).returncode == -11
    assert cause_in(said.read_text(encoding="utf-8")) == "SIGSEGV"


class Turns:
    def __init__(self) -> None:
        self.computing: list[str] = []
        self.began: list[str] = []
        self.turns = SuspectTurns(lambda: len(self.computing))

    async def begin(self, name: str, alone_until: int = 3, timeout_s: float = 30.0) -> worker_pb2.SequenceSpec:
        spec = worker_pb2.SequenceSpec(request_id=name, alone_until=alone_until, timeout_ms=int(timeout_s * 1000))
        async with self.turns.turn(spec):
            self.began.append(name)
            if alone_until:
                self.computing.append(name)
        return spec


async def test_suspects_begin_one_after_the_other() -> None:
    turns = Turns()
    tasks = [asyncio.create_task(turns.begin(name)) for name in "abc"]
    await asyncio.sleep(0.05)
    assert turns.began == ["a"]
    await turns.begin("no suspect", alone_until=0)
    tasks[1].cancel()
    turns.computing.remove("a")
    spec = await tasks[2]
    assert turns.began == ["a", "no suspect", "c"]
    assert spec.timeout_ms <= 29_960, "it has waited"


async def test_a_turn_that_does_not_come_ends_with_the_deadline() -> None:
    turns = Turns()
    await turns.begin("a")
    waiting = [asyncio.create_task(turns.begin(name, timeout_s=0.05)) for name in "bc"]
    for task in waiting:
        with pytest.raises(SequenceFailed, match="deadline"):
            await task
    assert turns.began == ["a"]
