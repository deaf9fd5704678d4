"""A process's starvation: how many times longer than on an idle machine its work takes, less one.

It is 0 on a quiet machine, about 8 for a busy thread whose core eight others want. It is the greatest of

    how late a timer of the event loop was, in half seconds
    how long its main thread waits for a core, relative to the rest of the time             /proc/self/schedstat
    the part of the time in which anything on the machine waits for a core                       /proc/pressure/cpu

and halves in HALF_S: a process starved a moment ago may be starved again before its peers learn of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from tandem.liveness.silence import MOST_S

TICK_S = 0.25
LATE_S = 0.5
HALF_S = 3.0
MOST = MOST_S  # a larger value makes no difference
SCHEDSTAT, PRESSURE = Path("/proc/self/schedstat"), Path("/proc/pressure/cpu")


class Starvation:
    """The starvation of this process, measured by `run`.

    `pressure(seconds)`: the system's, in the last so many seconds.
    """

    def __init__(self, pressure: Callable[[float], float]) -> None:
        self._pressure = pressure
        self._now = 0.0

    def now(self) -> float:
        """Returns the present starvation, from any thread."""
        return self._now

    async def run(self) -> None:
        """Measures starvation until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            await asyncio.sleep(TICK_S)
            took = loop.time() - began
            fallen = self._now * 0.5 ** (took / HALF_S)
            self._now = min(max((took - TICK_S) / LATE_S, self._pressure(took), fallen), MOST)


def no_pressure(seconds: float) -> float:
    """Returns 0: nothing competes for the CPU, or the system cannot report it."""
    return 0.0


class CpuPressure:
    """Reads CPU pressure from Linux's files; a file that the kernel lacks counts as no pressure."""

    def __init__(self, schedstat: Path = SCHEDSTAT, pressure: Path = PRESSURE) -> None:
        self._schedstat, self._pressure = schedstat, pressure
        self._waited_s = self._read_waited_s()

    def __call__(self, seconds: float) -> float:
        before, self._waited_s = self._waited_s, self._read_waited_s()
        waiting = min(max((self._waited_s - before) / seconds, 0.0), 1.0)
        return max(waiting / max(1.0 - waiting, 1.0 / MOST), self._read_share())

    def _read_waited_s(self) -> float:
        try:
            return int(self._schedstat.read_text(encoding="utf-8").split()[1]) / 1e9
        except (OSError, ValueError, IndexError):
            return 0.0

    def _read_share(self) -> float:
        """Returns the share of the last ten seconds, from the file's first line: some avg10=12.34 …"""
        try:
            return float(self._pressure.read_text(encoding="utf-8").split(maxsplit=2)[1].removeprefix("avg10=")) / 100
        except (OSError, ValueError, IndexError):
            return 0.0
