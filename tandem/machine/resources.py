"""CPUs and memory that a process may use: the machine's, within its affinity and its cgroups' limits (v1 and v2).

Any cgroup from the process's own up to the root that it sees may have a limit: the smallest counts.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from math import ceil
from pathlib import Path, PurePosixPath

PROC = Path("/proc")
V2 = ""  # in place of a controller's name: v2 has one tree for all controllers


def usable_cpus(proc: Path = PROC) -> int:
    """Returns the number of CPUs to compute on, rounded up."""
    return min([len(os.sched_getaffinity(0)), *(max(1, ceil(quota)) for quota in _cpu_quotas(proc))])


def usable_memory(proc: Path = PROC) -> int:
    """Returns the bytes of memory that the processes of this machine, or container, may have together."""
    lines = map(str.split, (proc / "meminfo").read_text(encoding="utf-8").splitlines())
    total = next(int(words[1]) * 1024 for words in lines if words[0] == "MemTotal:")
    return min([total, *_memory_limits(proc)])


def _cpu_quotas(proc: Path) -> Iterator[float]:
    """Yields each CPU quota as a number of CPUs. Files without a quota contain `max 100000`, or -1."""
    said = [_words(folder / "cpu.max") for folder in _cgroups(V2, proc)]
    for folder in _cgroups("cpu", proc):
        said.append(_words(folder / "cpu.cfs_quota_us") + _words(folder / "cpu.cfs_period_us"))
    for words in said:
        if len(words) == 2 and words[0].isdigit():
            yield int(words[0]) / int(words[1])


def _memory_limits(proc: Path) -> Iterator[int]:
    """Yields each memory limit in bytes. Files without a limit contain `max`, or more than any machine has."""
    files = [folder / "memory.max" for folder in _cgroups(V2, proc)]
    files += [folder / "memory.limit_in_bytes" for folder in _cgroups("memory", proc)]
    yield from (int(word) for file in files for word in _words(file) if word.isdigit())


def _cgroups(controller: str, proc: Path) -> Iterator[Path]:
    """Yields the folders of a controller's cgroups, from this process's own to the root that is mounted here."""
    own: dict[str, PurePosixPath] = {}
    for line in _lines(proc / "self" / "cgroup"):
        _, controllers, path = line.split(":", 2)
        own |= dict.fromkeys(controllers.split(","), PurePosixPath(path))
    for line in _lines(proc / "self" / "mountinfo"):
        place, _, kind = line.partition(" - ")
        root, point = place.split()[3:5]
        version, _, options = kind.split()[:3]
        is_its = version == "cgroup2" if controller == V2 else version == "cgroup" and controller in options.split(",")
        if is_its and controller in own:
            yield from _upwards(own[controller], PurePosixPath(root), Path(point))


def _upwards(own: PurePosixPath, root: PurePosixPath, point: Path) -> Iterator[Path]:
    """Yields folders from `own` up to a mount point, which may be the cgroup itself, under its name outside the
    container.
    """
    inside = own.relative_to(root) if own.is_relative_to(root) else PurePosixPath()
    yield from (point / part for part in (inside, *inside.parents))


def _words(file: Path) -> list[str]:
    return [word for line in _lines(file) for word in line.split()]


def _lines(file: Path) -> list[str]:
    """Returns a file's lines; none if it does not exist."""
    try:
        return file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
