"""How long this process itself was not run, for tests of how soon something is noticed: a slow machine fails none."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread

LOOK_S = 0.01


class RunClock:
    """`ran_s`: of the time since it was made, what the machine let this process have."""

    def __init__(self) -> None:
        self._began = self._looked = time.monotonic()
        self._stalled_s = 0.0

    @property
    def ran_s(self) -> float:
        return time.monotonic() - self._began - self._stalled_s

    def look(self) -> None:
        now = time.monotonic()
        self._stalled_s += max(0.0, now - self._looked - 2 * LOOK_S)
        self._looked = now


@contextmanager
def running_time() -> Iterator[RunClock]:
    clock, over = RunClock(), Event()

    def watch() -> None:
        while not over.wait(LOOK_S):
            clock.look()

    watching = Thread(target=watch, daemon=True)
    watching.start()
    try:
        yield clock
    finally:
        over.set()
        watching.join()
