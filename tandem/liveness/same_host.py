"""Processes of one host, by what its kernel says of them: the only silence that needs no patience.

A process is named by the boot of its machine, its PID namespace, its PID and when it began, so that no other is taken
for it: not one of another container, nor the next one with its PID.
"""

from __future__ import annotations

import os
from pathlib import Path

PROC = Path("/proc")
# As in proc(5): stopped by a signal; a zombie; dead.
GONE = "it is gone"
DEAD_STATES = {"T": "it is stopped", "Z": GONE, "X": GONE}


def this_process(proc: Path = PROC) -> str:
    """Empty where there is no such kernel."""
    try:
        _, began = _stat(proc, os.getpid())
        return f"{_host(proc)} {os.getpid()} {began}"
    except (OSError, ValueError):
        return ""


def dead_here(process: str, proc: Path = PROC) -> str:
    """Says what is wrong with a process of this host; empty where it may run, or cannot be seen from here."""
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
    """True if it was a process of this host and has ended; one that is stopped has not."""
    return dead_here(process) == GONE


def _host(proc: Path) -> str:
    boot = (proc / "sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    return f"{boot}/{(proc / 'self/ns/pid').readlink()}"


def _stat(proc: Path, pid: int) -> tuple[str, int]:
    """Its state, and when it began. Its name, in brackets, may hold anything."""
    fields = (proc / str(pid) / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return fields[0], int(fields[19])
