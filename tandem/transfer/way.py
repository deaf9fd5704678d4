"""Which way a payload goes to a reader on another core: through the caches, or past them by way of memory.

    through   better where the two cores share a cache: half the traffic with memory
    past      five times as fast where they do not: each line would have to be fetched from the reader's side first

A hypervisor moves cores about, so this changes from one second to the next. Nothing is asked of the machine: what the
ways took per byte lately decides, and one payload of TRIAL goes the other way.
"""

from __future__ import annotations

TRIAL = 64
MIN_BYTES = 64 << 10  # smaller payloads say too little
FAR = 2.0  # times as long through the caches: what memory carries twice slows the reader down too


class Way:
    def __init__(self) -> None:
        self._through = self._past = (0.0, 0.0)  # seconds per byte of the last two
        self._count = 0

    def past_caches(self) -> bool:
        """For the next payload. One bad measurement is enough to leave the caches, two good ones to come back."""
        self._count += 1
        far = max(self._through) > FAR * min(self._past)
        return far != (self._count % TRIAL == 0)

    def took(self, past_caches: bool, num_bytes: int, seconds: float) -> None:
        if num_bytes < MIN_BYTES:
            return
        if past_caches:
            self._past = self._past[1], seconds / num_bytes
        else:
            self._through = self._through[1], seconds / num_bytes
