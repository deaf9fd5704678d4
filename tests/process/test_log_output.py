"""Logs of real processes whose stderr is a full disk, a file at its limit, or a pipe that nobody reads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from tandem.process.log_output import MAX_KEPT_LINES, LogOutput

# Logs by both roads and from a finalizer, while a loop turns; its exit status says whether it turned on time.
NOISY = """
import asyncio, gc, logging, sys, warnings
import structlog
from tandem.process import telemetry

class Loud:
    def __del__(self):
        logging.getLogger("finalizer").warning("gone")

async def noise(lines):
    late, loop = 0.0, asyncio.get_running_loop()
    for number in range(lines):
        before = loop.time()
        structlog.get_logger().warning("ours", number=number, text="x" * 200)
        logging.getLogger("opentelemetry.exporter").error("export %s failed", number)
        warnings.warn(f"number {number}")
        asyncio.get_running_loop().call_exception_handler({"message": "nobody asked"})
        Loud()
        await asyncio.sleep(0)
        late = max(late, loop.time() - before)
    return late

logs = telemetry.set_up("noisy", "noisy-0")
late = asyncio.run(noise(int(sys.argv[1])))
logs.close()
sys.exit(0 if late < 5 else 1)
"""
LINES = 400


LIMITED = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))\n"
CLOSED = "import os\nos.close(2)\n"


def noisy(stderr: int | IO[bytes], lines: int = LINES, first: str = "") -> int:
    """`first`: what the process does before all else."""
    command = [sys.executable, "-c", first + NOISY, str(lines)]
    return subprocess.run(command, stderr=stderr, timeout=60, check=False).returncode


@contextmanager
def pipe() -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as reader, os.fdopen(writing, "wb") as writer:
        yield reader, writer


def test_a_full_disk_ends_nothing() -> None:
    with Path("/dev/full").open("wb") as full:
        assert noisy(full) == 0


def test_a_file_at_its_limit_ends_nothing(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as log:
        assert noisy(log, first=LIMITED) == 0
    assert (tmp_path / "log").stat().st_size == 10_000


def test_a_closed_pipe_ends_nothing() -> None:
    with pipe() as (reader, writer):
        reader.close()
        assert noisy(writer) == 0


def test_no_stderr_ends_nothing() -> None:
    assert noisy(subprocess.DEVNULL, first=CLOSED) == 0


def test_a_pipe_that_nobody_reads_holds_up_nothing() -> None:
    with pipe() as (_, writer):
        assert noisy(writer) == 0


def test_a_reader_gets_every_line() -> None:
    result = subprocess.run([sys.executable, "-c", NOISY, "500"], stderr=subprocess.PIPE, timeout=60, check=True)
    lines = [json.loads(line) for line in result.stderr.splitlines()]
    assert [line["number"] for line in lines if line["event"] == "ours"] == list(range(500))
    assert [line["event"] for line in lines if line.get("logger") == "finalizer"] == ["gone"] * 500
    assert len(lines) == 5 * 500


def test_what_was_lost_is_said_when_there_is_room(tmp_path: Path) -> None:
    """A limit on the size of files stands for the disk; it ends within a line, as a disk does."""
    code = """
import resource, structlog
from tandem.process import telemetry
logs, log = telemetry.set_up("t", "t-0"), structlog.get_logger()
whole = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, whole[1]))
for number in range(20):
    log.info("before", number=number)
resource.setrlimit(resource.RLIMIT_FSIZE, whole)
log.info("after")
"""
    with (tmp_path / "log").open("wb") as file:
        subprocess.run([sys.executable, "-c", code], stderr=file, check=True, timeout=60)
    *before, torn, lost, after = (tmp_path / "log").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["number"] for line in before] == list(range(len(before)))
    assert not torn.endswith("}")
    said = json.loads(lost)
    assert (said["event"], said["lines"], said["reason"]) == ("log lines lost", 20 - len(before), "File too large")
    assert said["service"] == "t"
    assert json.loads(after)["event"] == "after"


def test_kept_lines_are_bounded_and_written_when_somebody_reads() -> None:
    with pipe() as (reader, writer):
        output = LogOutput(writer.fileno(), lambda lines, reason: f"lost {lines}\n")
        for number in range(5000):
            output.write(f"{number:0999}\n")
        assert len(output._kept) == MAX_KEPT_LINES
        read = bytearray()
        reading = threading.Thread(target=lambda: read.extend(reader.read()))
        reading.start()
        while retrying := output._retrying:
            retrying.join()
        writer.close()
        reading.join()
    lines = read.decode().splitlines()
    lost = sum(int(line.split()[1]) for line in lines if line.startswith("lost"))
    numbers = [int(line) for line in lines if not line.startswith("lost")]
    assert numbers == list(range(len(numbers)))
    assert len(numbers) + lost == 5000


def test_an_endless_line_is_cut() -> None:
    with pipe() as (reader, writer):
        output = LogOutput(writer.fileno())
        output.write("x" * 10**7 + "\n")
        output.close()
        writer.close()
        assert len(reader.read()) < 10**5


def test_lines_of_a_block_are_written_at_its_end_several_at_once(tmp_path: Path) -> None:
    file = tmp_path / "log"
    with file.open("wb") as opened:
        output = LogOutput(opened.fileno())
        with output.together():
            for number in range(100):
                output.write(f"{number} {'x' * 100}\n")
            assert file.read_bytes() == b""
        output.write("last\n")
    lines = file.read_text(encoding="utf-8").splitlines()
    assert [line.split()[0] for line in lines] == [*map(str, range(100)), "last"]
    assert all(line.endswith("x" * 100) for line in lines[:-1])
