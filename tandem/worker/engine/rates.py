"""The speed of this worker's hardware, as seen in its own work: nothing is run only to be measured.

    step of prompt tokens          seconds ──────────────────────────> prefill
    step of decodes                seconds ──────> decode
    step of both                   seconds less a decode step's ─────> prefill
    blocks moved                   seconds in pushes and from the commit to its ack ─────> transfer

Reading and moving cost something each time and something each token, so a line is fitted:
seconds = each time + tokens * each token. Its slope is the rate: a worker that gets only short prompts is not slower
for that, and would get ever fewer if it said so. What was seen FORGET_S busy seconds ago counts half; an idle
worker keeps what it knew.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from tandem.registry import Distance

FORGET_S = 2.0
# Fewer prompt tokens than these take about as long as one, and say nothing of a rate. A decode worker that seemed slow
# for a short prompt, or for the rest of a cached one, would never be given another to correct itself.
LEAST_PREFILLED = 32
# A step of both says little about its prompt tokens where nearly all of it was the decode step's.
LEAST_SHARE = 0.1
# Of the time that a token took on the whole, at least so much is its own: what keeps a noisy fit within reason.
LEAST_SLOPE = 0.125
# Amounts that differ less than this, squared and relative, say nothing about a slope.
LEAST_SPREAD = 0.01
# A rate of fewer observations is noise: nothing is said of it.
LEAST_SEEN = 8
# Steps that only decode are short and soon many, and one during which the machine paused takes as long as a hundred.
LEAST_STEPS = 32
# Of how much longer a step was than those before it, so much is believed; of how much shorter, so little.
LONGER, SHORTER = 4.0, 1 / 256


class Line:
    """A line through (amount, seconds), by least squares that forget. Any thread may add."""

    def __init__(self, forget_s: float = FORGET_S) -> None:
        self._forget_s = forget_s
        self._lock = threading.Lock()
        self._seen = 0
        self._count = self._amount = self._seconds = self._amount_squared = self._product = 0.0

    def add(self, amount: float, seconds: float) -> None:
        keep = 0.5 ** (seconds / self._forget_s)
        with self._lock:
            self._seen += 1
            self._count = self._count * keep + 1
            self._amount = self._amount * keep + amount
            self._seconds = self._seconds * keep + seconds
            self._amount_squared = self._amount_squared * keep + amount * amount
            self._product = self._product * keep + amount * seconds

    @property
    def num_seen(self) -> int:
        with self._lock:
            return self._seen

    @property
    def mean_s(self) -> float:
        """Seconds of one observation; 0 before the first."""
        with self._lock:
            return self._seconds / self._count if self._count else 0.0

    @property
    def per_second(self) -> float:
        """Amount per second, what each observation costs by itself left out; 0 before LEAST_SEEN of them."""
        with self._lock:
            return 1 / self._slope() if self._seen >= LEAST_SEEN and self._seconds > 0 else 0.0

    def _slope(self) -> float:
        whole = self._seconds / self._amount
        spread = self._count * self._amount_squared - self._amount**2
        slope = whole
        if spread > LEAST_SPREAD * self._amount**2:
            slope = (self._count * self._product - self._amount * self._seconds) / spread
        return min(max(slope, LEAST_SLOPE * whole), whole)


class Rates:
    """A worker's rates; 0 is not measured yet."""

    def __init__(self) -> None:
        self._prefill, self._decode = Line(), Line()
        self._transfer = {distance: Line() for distance in Distance}
        self.distance_to: Callable[[str], Distance] = lambda peer: Distance.NEAR  # of workers by id
        self.longest_step_s = 0.0  # of late, whatever it computed; 0 before the first

    @property
    def prefill_tokens_per_s(self) -> float:
        """Prompt tokens prefilled per second of prefilling."""
        return self._prefill.per_second

    def transfer_tokens_per_s(self, distance: Distance) -> float:
        """Tokens whose KV was moved so far per second that moving it took beside computing it."""
        return self._transfer[distance].per_second

    @property
    def step_s(self) -> float:
        """Seconds of a step that only decodes, with batches as large as of late."""
        return self._decode.mean_s if self._decode.num_seen >= LEAST_STEPS else 0.0

    def step(self, num_prefilled: int, num_written: int, seconds: float) -> None:
        """A step computed so many prompt tokens and decoded so many sequences."""
        longest_s = self.longest_step_s
        if seconds < longest_s:
            self.longest_step_s -= SHORTER * (longest_s - seconds)
        else:
            self.longest_step_s = min(seconds, LONGER * longest_s) if longest_s else seconds
        if num_prefilled == 0:
            self._decode.add(num_written, seconds)
            return
        prefilling = seconds - self._decode.mean_s if num_written else seconds
        if num_prefilled >= LEAST_PREFILLED and prefilling > LEAST_SHARE * seconds:
            self._prefill.add(num_prefilled, prefilling)

    def moved(self, peer: str, num_tokens: int, seconds: float) -> None:
        """The KV of so many tokens reached this worker."""
        self._transfer[self.distance_to(peer)].add(num_tokens, seconds)
