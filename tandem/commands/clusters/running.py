"""Clusters that run on this machine: `tandem up` notes each in a file, by its process; `ps` lists and `down` ends them.

up        writes the file once all is ready, removes it at its end
up -d     a process of its own that does so; returns once its cluster is ready
ps, down, logs  read the files; one whose process is gone, or is another by now, is removed
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from pydantic import BaseModel, Field, ValidationError

from tandem.machine.home import state_folder
from tandem.settings import Settings, load

STOP_WAIT_S = 60.0
CHECK_S = 0.1


class RunningNote(BaseModel):
    """The note of a running cluster. `started`: its process's start in kernel ticks, as numbers are reused."""

    pid: int
    started: int
    model: str
    http: str
    grpc: str
    workers: str
    logs: str
    registry: str = ""  # the registry that its processes meet in


class DownSettings(Settings):
    """End the cluster that `tandem up` started on this machine; with --ray one that runs there."""

    pid: int | None = Field(None, ge=1, description="of the one to end, as `tandem ps` lists it, where several run")
    all: bool = Field(False, description="end all of them")


class LogsSettings(Settings):
    """Follow the logs of the clusters that `tandem up` started on this machine."""

    pid: int | None = Field(None, ge=1, description="of the only one to follow, as `tandem ps` lists it")
    lines: int = Field(10, ge=0, description="lines of each process that were written before")


def ps(arguments: list[str]) -> None:
    load(Settings, arguments, "tandem ps")
    found = running()
    print(_table(found) if found else "no cluster runs on this machine")


def _table(notes: list[RunningNote]) -> str:
    rows = [(str(note.pid), note.model, note.workers, note.http, note.grpc, note.logs) for note in notes]
    rows.insert(0, ("PID", "MODEL", "WORKERS", "HTTP", "GRPC", "LOGS"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    cells = ([cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in rows)
    return "\n".join("  ".join(row).rstrip() for row in cells)


def down_here(arguments: list[str]) -> None:
    settings = load(DownSettings, arguments, "tandem down")
    found = [note for note in running() if settings.pid in (None, note.pid)]
    if not found:
        raise SystemExit("tandem down: no such cluster runs on this machine; on Ray: tandem down --ray")
    if len(found) > 1 and not settings.all:
        raise SystemExit(f"tandem down: which one? --pid=PID, or --all\n{_table(found)}")
    for note in found:
        os.kill(note.pid, signal.SIGTERM)
    if left := asyncio.run(_ended(found)):
        raise SystemExit(f"tandem down: not over after {STOP_WAIT_S:.0f} s: {', '.join(str(n.pid) for n in left)}")
    print(f"stopped {', '.join(f'{note.model} ({note.pid})' for note in found)}")


def logs(arguments: list[str]) -> None:
    """Follow the logs of all processes of this machine's clusters, restarted ones included, until Ctrl-C."""
    settings = load(LogsSettings, arguments, "tandem logs")
    notes = [note for note in running() if settings.pid in (None, note.pid)]
    files = sorted(str(file) for note in notes for file in Path(note.logs).glob("*.log"))
    if not files:
        raise SystemExit("tandem logs: no such cluster runs on this machine")
    os.execvp("tail", ["tail", f"--lines={settings.lines}", "-F", *files])


def up_in_background(arguments: list[str], logs: Path, ready_timeout_s: float) -> None:
    """Run `tandem up` as a process that outlives this one, and wait until its cluster is ready.

    Raises:
        SystemExit: it ended or was not ready in time; with its last lines.
    """
    logs.mkdir(parents=True, exist_ok=True)
    log = logs / "up.log"
    with log.open("wb") as output:
        child = subprocess.Popen(
            [sys.executable, "-m", "tandem", "up", *arguments],
            stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    until, ready = time.monotonic() + ready_timeout_s, False
    try:
        while not ready and time.monotonic() < until and child.poll() is None:
            time.sleep(CHECK_S)
            ready = any(note.pid == child.pid for note in running())
    finally:
        if not ready:  # also after Ctrl-C, which it does not receive itself
            child.terminate()
    if ready:
        print(
            log.read_text(errors="replace", encoding="utf-8").replace(
                "Ctrl-C stops everything.", "`tandem down` stops everything."
            )
        )
        return
    raise SystemExit(f"tandem up: it did not become ready\n{log.read_text(errors='replace', encoding='utf-8')[-2000:]}")


@contextmanager
def noted(said: Mapping[str, str]) -> Iterator[None]:
    """Note this process as a running cluster during the block."""
    note = RunningNote.model_validate({**said, "pid": os.getpid(), "started": _started(os.getpid())})
    file = _folder() / f"{note.pid}.json"
    try:
        with suppress(OSError):  # without a writable home the cluster runs all the same
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(note.model_dump_json(), encoding="utf-8")
        yield
    finally:
        with suppress(OSError):
            file.unlink(missing_ok=True)


def running() -> list[RunningNote]:
    """Returns the notes of running clusters, oldest first."""
    found = []
    for file in _folder().glob("*.json"):
        with suppress(OSError):
            try:
                note = RunningNote.model_validate(json.loads(file.read_text(encoding="utf-8")))
            except (ValueError, ValidationError):
                continue
            if note.started == _started(note.pid):
                found.append(note)
            else:
                file.unlink(missing_ok=True)
    return sorted(found, key=lambda note: note.started)


async def _ended(notes: list[RunningNote]) -> list[RunningNote]:
    """Wait for clusters to end. Returns those that still run after STOP_WAIT_S."""
    with suppress(TimeoutError):
        async with asyncio.timeout(STOP_WAIT_S):
            while any(note.started == _started(note.pid) for note in notes):
                await asyncio.sleep(CHECK_S)
    return [note for note in notes if note.started == _started(note.pid)]


def _started(pid: int) -> int | None:
    """Returns a process's start in kernel ticks; None if it has ended."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return None
    return None if words[0] == "Z" else int(words[19])


def _folder() -> Path:
    return state_folder("running")
