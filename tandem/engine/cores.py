"""Cores that engines on one machine share: each has some of its own and borrows those of idle engines.

    step ── work: own file locked ── threads: all cores less those of engines whose file is locked ── rest: unlocked

An engine that computes calls `threads` again every few milliseconds, so a borrowed core is soon returned. The kernel
releases a process's lock when the process dies, so a dead engine holds no core.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from tandem.machine.resources import usable_cpus


class Cores:
    """The cores of an engine: `own` ones and those it may borrow. `folder`, if given, has a file for each engine."""

    def __init__(self, own: int, folder: Path | None = None) -> None:
        self._own, self._folder, self._working = own, folder, False
        self._total = max(own, usable_cpus())
        self._others: dict[str, int] = {}
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self._name = f"{own}-threads-of-{os.getpid()}-{id(self)}"
            self._file = os.open(folder / self._name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)

    def threads(self) -> int:
        """Returns how many threads to compute with now: this engine's own and those of idle engines."""
        if self._folder is None:
            return self._own
        busy = sum(_own_threads(name) for name in os.listdir(self._folder) if name != self._name and self._works(name))
        return max(self._own, self._total - busy)

    def work(self) -> None:
        """Locks this engine's file: other engines do not borrow its cores until `rest`."""
        if self._folder is not None and not self._working:
            fcntl.flock(self._file, fcntl.LOCK_EX)  # other engines hold this lock for microseconds only
            self._working = True

    def rest(self) -> None:
        """Unlocks this engine's file: it has nothing to compute, so other engines may borrow its cores."""
        if self._working:
            fcntl.flock(self._file, fcntl.LOCK_UN)
            self._working = False

    def close(self) -> None:
        """Removes this engine's file and closes all files: its cores are free for other engines."""
        if self._folder is not None:
            for file in (self._file, *self._others.values()):
                os.close(file)
            (self._folder / self._name).unlink(missing_ok=True)
            self._folder, self._working, self._others = None, False, {}

    def _works(self, name: str) -> bool:
        assert self._folder is not None
        try:
            if name not in self._others:
                self._others[name] = os.open(self._folder / name, os.O_RDONLY | os.O_CLOEXEC)
            fcntl.flock(self._others[name], fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
        fcntl.flock(self._others[name], fcntl.LOCK_UN)
        return False


def _own_threads(name: str) -> int:
    return int(name.partition("-")[0])
