"""Faults that end a worker's process from within."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

STANDS_STILL = """
import asyncio, time
from tandem.process import loop_watch
from tandem.worker.life import process

class Worker:
    async def run(self):
        await asyncio.sleep(0)
        time.sleep(60)

loop_watch.STALL_S = 0.5
asyncio.run(process.run_to_its_end(Worker()))
"""


def test_a_process_whose_loop_stands_still_ends_and_says_where() -> None:
    done = subprocess.run(
        [sys.executable, "-c", STANDS_STILL], capture_output=True, encoding="utf-8", timeout=50, check=False
    )
    assert done.returncode == 1
    assert "in run" in done.stderr


@pytest.mark.long
def test_it_ends_though_nobody_reads_where() -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with os.fdopen(reading, "rb"), os.fdopen(writing, "wb", buffering=0) as writer:
        while writer.write(b"x" * 4096):
            pass
        os.set_blocking(writing, True)
        done = subprocess.run([sys.executable, "-c", STANDS_STILL], stderr=writer, timeout=50, check=False)
    assert done.returncode == 1
