"""Distinguishes a process that the kernel killed for lack of memory from one that was killed otherwise.

The kernel counts the OOM kills of the whole machine; containers see this count, too. A container's own count ends with
it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tandem.containment.crash_page import cause_of

_COUNTS = Path("/proc/vmstat")


def oom_kills_here() -> int:
    """Returns the number of OOM kills on this machine so far; 0 if the kernel does not report it."""
    try:
        lines = _COUNTS.read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


class OomKills:
    """Finds the cause of processes' ends, for their parent. Call `look` about once a second."""

    def __init__(self, count: Callable[[], int] = oom_kills_here) -> None:
        self._count = count
        self._seen = self._before = count()

    def look(self) -> None:
        """Reads the count. OOM kills counted by now do not explain a process that ends later."""
        self._before, self._seen = self._seen, self._count()

    def how_it_died(self, status: int) -> str:
        """Returns a signal's name or OOM for a process that has just ended with `status`."""
        cause = cause_of(status)
        return "OOM" if cause == "SIGKILL" and self._took_one() else cause

    def _took_one(self) -> bool:
        taken = self._count() > self._before
        self._before += taken
        return taken
