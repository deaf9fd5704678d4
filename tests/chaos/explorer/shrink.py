"""The smallest part of a schedule that still fails: requests and faults are left out, one after another."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

from tests.chaos.explorer.run import Result
from tests.chaos.explorer.schedule import Schedule

MAX_RUNS = 60


def shrink(schedule: Schedule, run: Callable[[Schedule], Result]) -> tuple[Result, str]:
    """The result of the smallest failing part found, and the parts kept: requests, a slash, faults."""
    kept = set(range(len(schedule.requests))), set(range(len(schedule.faults)))
    best = run(schedule)
    runs = count(1)
    progress = True
    while progress:
        progress = False
        for part in kept:
            for index in sorted(part):
                if next(runs) > MAX_RUNS:
                    return best, _text(*kept)
                part.discard(index)
                result = run(schedule.only(frozenset(kept[0]), frozenset(kept[1])))
                if result.violations:
                    best, progress = result, True
                else:
                    part.add(index)
    return best, _text(*kept)


def parse(text: str) -> tuple[frozenset[int], frozenset[int]]:
    """What `shrink` says was kept."""
    requests, _, faults = text.partition("/")
    return _numbers(requests), _numbers(faults)


def _text(requests: set[int], faults: set[int]) -> str:
    return ",".join(map(str, sorted(requests))) + "/" + ",".join(map(str, sorted(faults)))


def _numbers(text: str) -> frozenset[int]:
    return frozenset(int(number) for number in text.split(",") if number)
