"""The choice of how to store a payload that another core will read: through the caches, or past them to memory.

    through   better where the two cores share a cache: half the traffic with memory
    past      five times as fast where they do not: each line would have to be fetched from the reader's side first

A hypervisor moves cores, so the better way changes from one second to the next. The recent times per byte of both ways
decide, not a query of the machine; one payload of TRIAL is stored the other way to measure it.
"""

from __future__ import annotations

from collections import deque

TRIAL = 64
LAST = 3  # measurements kept of each way; their median counts, for any single one may be an outlier
MIN_BYTES = 64 << 10  # smaller payloads are not measured: their times are too noisy
# Ratios of the time through the caches to the time past them. Above AWAY, stores go past the caches; the ratio is high
# because they also slow the reader. Below BACK, stores go through the caches again: in a slot filled past the caches,
# stores through them look faster than they are.
AWAY, BACK = 2.0, 1.25


class StorePolicy:
    def __init__(self) -> None:
        self._costs = {past_caches: deque([0.0] * LAST, LAST) for past_caches in (False, True)}  # seconds per byte
        self._count = 0
        self._far = False

    def past_caches(self) -> bool:
        """True if the next payload is to be stored past the caches."""
        self._count += 1
        return self._far != (self._count % TRIAL == 0)

    def took(self, past_caches: bool, num_bytes: int, seconds: float) -> None:
        if num_bytes >= MIN_BYTES:
            self._costs[past_caches].append(seconds / num_bytes)
            through, past = (sorted(costs)[LAST // 2] for costs in self._costs.values())
            self._far = through > (BACK if self._far else AWAY) * past
