"""Tells a process that the kernel killed for want of memory from one that somebody killed.

The kernel counts such kills of the whole machine, which containers see, too; a container's own count ends with it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tandem.containment.crash_page import cause_of

_COUNTS = Path("/proc/vmstat")


def oom_kills_here() -> int:
    """How many processes of this machine the kernel has killed for want of memory; 0 where it does not say."""
    try:
        lines = _COUNTS.read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


class OomKills:
    """For someone who waits for processes to end; `look` every second or so."""

    def __init__(self, count: Callable[[], int] = oom_kills_here) -> None:
        self._count = count
        self._seen = self._before = count()

    def look(self) -> None:
        """Look: what is counted by now says nothing of a process that ends later."""
        self._before, self._seen = self._seen, self._count()

    def how_it_died(self, status: int) -> str:
        """A signal's name or OOM, of a process that has ended just now with `status`."""
        cause = cause_of(status)
        return "OOM" if cause == "SIGKILL" and self._took_one() else cause

    def _took_one(self) -> bool:
        taken = self._count() > self._before
        self._before += taken
        return taken
