"""The state of processes on this host, from its kernel: a process known to be dead need not be waited for.

A process's name has the boot id of its machine, its PID namespace, its PID and its start time, so that it is never
confused with a process of another container, or a later one with the same PID.
"""

from __future__ import annotations

import os
from pathlib import Path

PROC = Path("/proc")
# States as in proc(5): stopped by a signal; a zombie; dead.
GONE = "it is gone"
DEAD_STATES = {"T": "it is stopped", "Z": GONE, "X": GONE}


def this_process(proc: Path = PROC) -> str:
    """Returns this process's name; empty if the kernel is not Linux."""
    try:
        _, began = _stat(proc, os.getpid())
        return f"{_host(proc)} {os.getpid()} {began}"
    except (OSError, ValueError):
        return ""


def dead_here(process: str, proc: Path = PROC) -> str:
    """Describes what is wrong with a process of this host; empty if it may run, or is not visible from here."""
    host, _, named = process.partition(" ")
    try:
        pid, began = map(int, named.split())
        if host != _host(proc):
            return ""
    except (OSError, ValueError):
        return ""
    try:
        state, found = _stat(proc, pid)
    except (OSError, ValueError):
        return GONE
    return DEAD_STATES.get(state, "") if found == began else GONE


def gone_here(process: str) -> bool:
    """True if a process of this host has ended. A stopped process has not ended."""
    return dead_here(process) == GONE


def _host(proc: Path) -> str:
    boot = (proc / "sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    return f"{boot}/{(proc / 'self/ns/pid').readlink()}"


def _stat(proc: Path, pid: int) -> tuple[str, int]:
    """Returns a process's state and start time. Its name, in brackets, may contain any characters."""
    fields = (proc / str(pid) / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return fields[0], int(fields[19])
