"""What this worker's hardware does, as seen in its own work: nothing is run only to be measured.

    step of prompt tokens          seconds ──────────────────────────> prefill: tokens / seconds
    step of decodes                seconds ──────> decode: steps / seconds
    step of both                   seconds less a decode step's ─────> prefill
    blocks moved                   seconds in pushes and from the commit to its ack ─────> transfer: tokens / seconds

Each rate is a sum over a sum, both of which forget: what was seen FORGET_S busy seconds ago counts half as much. So a
long step weighs as much as the many short ones that fit into it, and an idle worker keeps what it knew.
"""

from __future__ import annotations

import threading

FORGET_S = 2.0
# A step of both says little about its prompt tokens where nearly all of it was the decode step's.
LEAST_SHARE = 0.1


class Rate:
    """Amount per second, of late; 0 until the first observation. Any thread may add."""

    def __init__(self, forget_s: float = FORGET_S) -> None:
        self._forget_s = forget_s
        self._lock = threading.Lock()
        self._amount = self._seconds = 0.0

    def add(self, amount: float, seconds: float) -> None:
        keep = 0.5 ** (seconds / self._forget_s)
        with self._lock:
            self._amount = self._amount * keep + amount
            self._seconds = self._seconds * keep + seconds

    @property
    def per_second(self) -> float:
        with self._lock:
            return self._amount / self._seconds if self._seconds > 0 else 0.0


class Rates:
    """A worker's three rates; 0 is not measured yet."""

    def __init__(self) -> None:
        self._prefill, self._decode, self._transfer = Rate(), Rate(), Rate()

    @property
    def prefill_tokens_per_s(self) -> float:
        """Prompt tokens read per second of reading."""
        return self._prefill.per_second

    @property
    def transfer_tokens_per_s(self) -> float:
        """Tokens whose KV was moved per second that moving it took beside computing it."""
        return self._transfer.per_second

    @property
    def step_s(self) -> float:
        """Seconds of a step that only decodes, with batches as large as of late."""
        steps_per_s = self._decode.per_second
        return 1 / steps_per_s if steps_per_s else 0.0

    def step(self, num_read: int, num_written: int, seconds: float) -> None:
        """A step computed so many prompt tokens and decoded so many sequences."""
        if num_read == 0:
            self._decode.add(1, seconds)
            return
        reading = seconds - self.step_s if num_written else seconds
        if reading > LEAST_SHARE * seconds:
            self._prefill.add(num_read, reading)

    def moved(self, num_tokens: int, seconds: float) -> None:
        """The KV of so many tokens reached the other worker."""
        self._transfer.add(num_tokens, seconds)
