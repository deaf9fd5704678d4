"""How starved a process is: how many times longer than on an idle machine everything takes it, less one.

0 on a quiet machine, about 8 for a busy thread where eight others want its core. It is the greatest of

    how late a timer of the event loop was, in half seconds
    how long its main thread waits for a core, beside the time that it has one or wants none     /proc/self/schedstat
    the part of the time in which anything on the machine waits for a core                       /proc/pressure/cpu

and falls by half in HALF_S: what was starved a moment ago may be so again before its peers hear of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from tandem.liveness.silence import MOST_S

TICK_S = 0.25
LATE_S = 0.5
HALF_S = 3.0
MOST = MOST_S  # more makes no difference to anyone
SCHEDSTAT, PRESSURE = Path("/proc/self/schedstat"), Path("/proc/pressure/cpu")


class Starvation:
    """That of the process that runs `run`. `pressure(seconds)`: what the system says of the last so many seconds."""

    def __init__(self, pressure: Callable[[float], float]) -> None:
        self._pressure = pressure
        self._now = 0.0

    def now(self) -> float:
        """From any thread."""
        return self._now

    async def run(self) -> None:
        """Until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            await asyncio.sleep(TICK_S)
            took = loop.time() - began
            fallen = self._now * 0.5 ** (took / HALF_S)
            self._now = min(max((took - TICK_S) / LATE_S, self._pressure(took), fallen), MOST)


def no_pressure(seconds: float) -> float:
    """Reports no pressure: nothing competes for the CPU, or nobody could say so."""
    return 0.0


class CpuPressure:
    """Reads Linux's files; what a kernel does not have counts as no pressure."""

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
        """Share of the last ten seconds, as the file's first line has it: some avg10=12.34 …"""
        try:
            return float(self._pressure.read_text(encoding="utf-8").split(maxsplit=2)[1].removeprefix("avg10=")) / 100
        except (OSError, ValueError, IndexError):
            return 0.0
