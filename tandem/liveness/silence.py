"""Failure detection by silence. The silence that is allowed grows with the starvation that both sides report.

    every INTERVAL_S    each side sends a ping, whatever else it sends, with its own starvation (starvation.py)
    silence             time since anything was received, less the time in which this process itself did not run
    the peer is lost    after LIMIT_S x (1 + own + peer's starvation) of silence, at most MOST_S; a starvation that the
                        peer reported fades as it stays silent; after MOST_S if no other process could take its place,
                        as giving it up early would then only make work run twice
    doubtful            the peer would be lost if it had not reported starvation: others are preferred
    unheard             what this side sends does not reach the peer, which reports that it hears nothing

As in Lifeguard (arXiv 1707.00788), a process that did not run itself does not suspect its peers for that time. The
module has no clock of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite

INTERVAL_S = 0.3
LIMIT_S = 1.5
MOST_S = 20.0
# A longer pause between two looks means that this process did not run: only this much of the pause counts as silence.
LOOK_S = 0.5
LEAST_S = 0.001
# After this long a silence a peer's reported starvation counts half: a starved peer still sends pings in between.
FADES_S = 6.0


@dataclass(frozen=True, slots=True)
class Vitals:
    """The state of a process, and if others could take its place or its peers'."""

    starvation: Callable[[], float] = lambda: 0.0
    is_sole: Callable[[], bool] = lambda: False  # no other process could do this one's work
    has_sole_peer: Callable[[], bool] = lambda: False


QUIET = Vitals()


def stretched(seconds: float, starvation: float) -> float:
    """Returns how long others should wait for a starved process, if they wait `seconds` for one that is not."""
    return min(seconds * (1 + starvation), max(seconds, MOST_S))


class Liveness:
    """The signs of life of one peer. Its reader sets `heard_at`; `ping_due` and `lost` are called regularly."""

    def __init__(self, now: float, starvation: Callable[[], float] = lambda: 0.0) -> None:
        self.heard_at = now
        self.sole = False  # no other process could take the peer's place
        self.pings = False  # the peer has sent a ping
        self.unheard_s = 0.0  # how long the peer had heard nothing from here, by its last report
        self._starvation = starvation
        self._peer = 0.0
        self._pinged_at = self._looked_at = self._awake_since = now
        self.quiet_s = 0.0  # silent_s at the last look

    def heard(self, starvation: float, now: float) -> None:
        """Records a ping of the peer."""
        self.heard_at, self.pings = now, True
        self._peer = min(max(starvation, 0.0), MOST_S) if isfinite(starvation) else MOST_S

    @property
    def usual_limit_s(self) -> float:
        """The silence that both sides' present starvation allows."""
        peer: float = self._peer * 0.5 ** (self.quiet_s / FADES_S)
        return min(LIMIT_S * (1 + self._starvation() + peer), MOST_S)

    @property
    def limit_s(self) -> float:
        return MOST_S if self.sole else self.usual_limit_s

    def due_s(self, now: float) -> float:
        """Returns the seconds until the next look, at most INTERVAL_S."""
        left_s = self.limit_s - self.quiet_s
        return max(LEAST_S, min(self._pinged_at + INTERVAL_S - now, left_s if left_s > 0 else INTERVAL_S))

    def ping_due(self, now: float) -> bool:
        """Returns True if a ping should be sent now, and counts it as sent."""
        if now < self._pinged_at + INTERVAL_S:
            return False
        self._pinged_at = now
        return True

    def silent_s(self, now: float) -> float:
        """Returns how long the peer has been silent while this process ran."""
        if self.heard_at >= self._looked_at:
            self.quiet_s = 0.0
        if now - self._looked_at > LOOK_S:
            self._awake_since = now
        self.quiet_s += min(now - max(self._looked_at, self.heard_at), LOOK_S)
        self._looked_at = now
        return self.quiet_s

    def unheard(self, now: float) -> bool:
        """True if the peer reports that it hears nothing, though pings have been sent for long enough to reach it."""
        awake_s = now - self._awake_since
        return min(self.unheard_s, awake_s - INTERVAL_S) >= self.usual_limit_s

    def doubtful(self, now: float) -> bool:
        return self.silent_s(now) >= min(LIMIT_S * (1 + self._starvation()), MOST_S)

    def lost(self, now: float) -> bool:
        return self.silent_s(now) >= self.limit_s
