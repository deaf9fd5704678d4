"""The speed of this worker's hardware, measured in its ordinary work: nothing runs only to be measured.

    step of prompt tokens          seconds ──────────────────────────> prefill
    step of decodes                seconds ──────> decode
    step of both                   seconds less a decode step's ─────> prefill
    blocks moved                   seconds in pushes and from the commit to its ack ─────> transfer

Prefilling and moving KV have a cost per operation and a cost per token, so a line is fitted:
seconds = per operation + tokens * per token. The rate is 1 / slope: otherwise a worker that gets short prompts would
seem slow, and would get ever fewer. Observations from FORGET_S busy seconds ago count half; an idle worker keeps its
rates.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from tandem.registry import Distance

FORGET_S = 2.0
# Fewer prompt tokens than this take about as long as one token, so they are not counted. A decode worker that seemed
# slow by a short prompt, or by the rest of a cached one, would never get another prompt that corrects the rate.
LEAST_PREFILLED = 32
# A mixed step is not counted as prefill if its prefill part is a smaller share of its time than this.
LEAST_SHARE = 0.1
# The least slope, as a part of (all seconds / all tokens): bounds a noisy fit.
LEAST_SLOPE = 0.125
# The least relative variance of amounts at which a slope is fitted.
LEAST_SPREAD = 0.01
# A rate needs this many observations; with fewer it counts as not measured.
LEAST_SEEN = 8
# The same for decode steps, which are short and many: one during which the machine paused takes as long as a hundred.
LEAST_STEPS = 32
# The longest step grows to at most LONGER times its value, and moves by SHORTER of the difference to a shorter step.
LONGER, SHORTER = 4.0, 1 / 256


class Line:
    """A line fitted to (amount, seconds) by least squares, in which old observations fade. Thread-safe."""

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
        """The mean seconds of an observation; 0 before the first."""
        with self._lock:
            return self._seconds / self._count if self._count else 0.0

    @property
    def per_second(self) -> float:
        """The amount per second, without the cost per observation; 0 before LEAST_SEEN observations."""
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
    """A worker's measured rates; 0: not measured yet."""

    def __init__(self) -> None:
        self._prefill, self._decode = Line(), Line()
        self._transfer = {distance: Line() for distance in Distance}
        self.distance_to: Callable[[str], Distance] = lambda peer: Distance.NEAR  # by worker id
        self.longest_step_s = 0.0  # the longest recent step of any kind; 0 before the first

    @property
    def prefill_tokens_per_s(self) -> float:
        """The prompt tokens prefilled per second of prefilling."""
        return self._prefill.per_second

    def transfer_tokens_per_s(self, distance: Distance) -> float:
        """Returns the tokens per second whose KV moves over this distance; 0: not measured yet."""
        return self._transfer[distance].per_second

    @property
    def step_s(self) -> float:
        """The mean seconds of a step that only decodes, at recent batch sizes."""
        return self._decode.mean_s if self._decode.num_seen >= LEAST_STEPS else 0.0

    def step(self, num_prefilled: int, num_written: int, seconds: float) -> None:
        """Records a step that prefilled `num_prefilled` prompt tokens and decoded `num_written` tokens."""
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
        """Records a transfer of KV between this worker and `peer`."""
        self._transfer[self.distance_to(peer)].add(num_tokens, seconds)
