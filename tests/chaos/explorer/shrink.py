"""The smallest part of a schedule that still fails: requests and faults are left out, one after another.

What is left runs at other moments than in the whole, so a part is tried with other randomness as well: its luck.
"""

from __future__ import annotations

from collections.abc import Callable

from tests.chaos.explorer.run import Result
from tests.chaos.explorer.schedule import Schedule

MAX_RUNS, LUCKS = 120, 4


def shrink(schedule: Schedule, run: Callable[[Schedule], Result]) -> tuple[Result, str]:
    """The result of the smallest failing part found, and what was kept: requests, faults, luck."""
    kept = set(range(len(schedule.requests))), set(range(len(schedule.faults)))
    best, luck = run(schedule), 0
    runs, progress = 1, True
    while progress:
        progress = False
        for part, index in [(one, index) for one in kept for index in sorted(one)]:
            part.discard(index)
            for tried in range(LUCKS):
                result = run(schedule.only(frozenset(kept[0]), frozenset(kept[1]), tried))
                runs += 1
                if result.violations:
                    best, luck, progress = result, tried, True
                    break
                if runs > MAX_RUNS:
                    part.add(index)
                    return best, _text(*kept, luck)
            else:
                part.add(index)
    return best, _text(*kept, luck)


def parse(text: str) -> tuple[frozenset[int], frozenset[int], int]:
    """Reads back the parts that `shrink` printed as kept."""
    requests, faults, luck = (text + "//").split("/")[:3]
    return _numbers(requests), _numbers(faults), int(luck or 0)


def _text(requests: set[int], faults: set[int], luck: int) -> str:
    return "/".join((",".join(map(str, sorted(requests))), ",".join(map(str, sorted(faults))), str(luck)))


def _numbers(text: str) -> frozenset[int]:
    return frozenset(int(number) for number in text.split(",") if number)
