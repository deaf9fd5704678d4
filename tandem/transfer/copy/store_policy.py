"""How a payload that another core will read is stored: through the caches, or past them straight to memory.

    through   better where the two cores share a cache: half the traffic with memory
    past      five times as fast where they do not: each line would have to be fetched from the reader's side first

A hypervisor moves cores about, so this changes from one second to the next. Nothing is asked of the machine: what each
took per byte lately decides, and one payload of TRIAL is stored as the other.
"""

from __future__ import annotations

from collections import deque

TRIAL = 64
LAST = 3  # measurements of each, of which the middle one counts: any one may be an accident
MIN_BYTES = 64 << 10  # smaller payloads say too little
# Ratios of time through the caches to time past them. The first to go past the caches: memory that carries the bytes
# twice slows the reader too. The second to come back: in a slot filled past them, the caches look faster than they are.
AWAY, BACK = 2.0, 1.25


class StorePolicy:
    def __init__(self) -> None:
        self._costs = {past_caches: deque([0.0] * LAST, LAST) for past_caches in (False, True)}  # seconds per byte
        self._count = 0
        self._far = False

    def past_caches(self) -> bool:
        """For the next payload."""
        self._count += 1
        return self._far != (self._count % TRIAL == 0)

    def took(self, past_caches: bool, num_bytes: int, seconds: float) -> None:
        if num_bytes >= MIN_BYTES:
            self._costs[past_caches].append(seconds / num_bytes)
            through, past = (sorted(costs)[LAST // 2] for costs in self._costs.values())
            self._far = through > (BACK if self._far else AWAY) * past
