"""Tells a process that the kernel killed for want of memory from one that somebody killed."""

from __future__ import annotations

from pathlib import Path

from tandem.containment import cause_of


class OomKills:
    """How often the kernel has killed a process of this one's cgroup for want of memory; `look` every second or so."""

    def __init__(self, events: Path | None) -> None:
        """`events`: the file that counts them; None where there is none."""
        self._events = events
        self._seen = self._before = self._count()

    @classmethod
    def here(cls) -> OomKills:
        return cls(_events_here())

    def look(self) -> None:
        """Look: what is counted by now says nothing of a process that ends later."""
        self._before, self._seen = self._seen, self._count()

    def took_one(self) -> bool:
        """True if a process that was killed just now was killed so."""
        taken = self._count() > self._before
        self._before += taken
        return taken

    def _count(self) -> int:
        try:
            lines = self._events.read_text().splitlines() if self._events else []
        except OSError:
            return 0
        return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


def _events_here() -> Path | None:
    try:
        groups = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    except OSError:
        return None
    paths = {controllers: path for _, controllers, path in groups}
    found = [
        Path(f"/sys/fs/cgroup{paths.get('', '/')}/memory.events"),
        Path(f"/sys/fs/cgroup/memory{paths.get('memory', '/')}/memory.oom_control"),
        Path("/sys/fs/cgroup/memory.events"),  # of a container, which sees itself at the top
        Path("/sys/fs/cgroup/memory/memory.oom_control"),
    ]
    return next((path for path in found if path.is_file()), None)


def how_it_died(status: int, kills: OomKills) -> str:
    """A signal's name or OOM, of a process that has ended just now."""
    cause = cause_of(status)
    return "OOM" if cause == "SIGKILL" and kills.took_one() else cause
