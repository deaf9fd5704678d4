"""Is the peer alive? Slow is not dead: how long silence may last grows with what both sides say of their starvation.

    every INTERVAL_S    each side sends a ping, whatever else it sends, and says how starved it is (starvation.py)
    silence             time since anything was heard, in which this side itself was awake
    the peer is lost    after LIMIT_S x (1 + own + peer's starvation) of silence, at most MOST_S, where what the peer
                        said counts for less the longer it is silent; after MOST_S where nobody could take its place,
                        for then giving it up early would only make work run twice
    doubtful            the peer would be lost had it not said that it is starved: others are preferred
    unheard             what is sent here does not reach the peer, which is heard, and says that it hears nothing

As in Lifeguard (arXiv 1707.00788), a process that was not run itself blames nobody for it. No clock of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite

INTERVAL_S = 0.3
LIMIT_S = 1.5
MOST_S = 20.0
# A process that looks less often than this was not run: only so much of the pause counts as silence.
LOOK_S = 0.5
LEAST_S = 0.001
# What a peer said of its starvation counts half after so long a silence: pings of a starved one come in between.
FADES_S = 6.0


@dataclass(frozen=True, slots=True)
class Vitals:
    """How a process is, and how much depends on it and on its peers."""

    starvation: Callable[[], float] = lambda: 0.0
    is_sole: Callable[[], bool] = lambda: False  # nobody else does what this process does
    has_sole_peer: Callable[[], bool] = lambda: False


QUIET = Vitals()


def stretched(seconds: float, starvation: float) -> float:
    """How long others should wait for a sign of life of a process so starved, where they wait so long for others."""
    return min(seconds * (1 + starvation), max(seconds, MOST_S))


class Liveness:
    """Signs of life of one peer. Its reader sets `heard_at`; `ping_due` and `lost` are asked in turns."""

    def __init__(self, now: float, starvation: Callable[[], float] = lambda: 0.0) -> None:
        self.heard_at = now
        self.sole = False  # nobody could take the peer's place
        self.pings = False  # the peer has sent one
        self.unheard_s = 0.0  # for how long the peer has heard nothing from here, as it last said
        self._starvation = starvation
        self._peer = 0.0
        self._pinged_at = self._looked_at = self._awake_since = now
        self.quiet_s = 0.0  # as silent_s, when last looked

    def heard(self, starvation: float, now: float) -> None:
        """The peer has sent a ping."""
        self.heard_at, self.pings = now, True
        self._peer = min(max(starvation, 0.0), MOST_S) if isfinite(starvation) else MOST_S

    @property
    def usual_limit_s(self) -> float:
        """As starved as both are, by when one hears of the other."""
        peer: float = self._peer * 0.5 ** (self.quiet_s / FADES_S)
        return min(LIMIT_S * (1 + self._starvation() + peer), MOST_S)

    @property
    def limit_s(self) -> float:
        return MOST_S if self.sole else self.usual_limit_s

    def due_s(self, now: float) -> float:
        """Seconds until it should be asked again, never more than INTERVAL_S."""
        left_s = self.limit_s - self.quiet_s
        return max(LEAST_S, min(self._pinged_at + INTERVAL_S - now, left_s if left_s > 0 else INTERVAL_S))

    def ping_due(self, now: float) -> bool:
        """True if one should be sent now, which then counts as sent."""
        if now < self._pinged_at + INTERVAL_S:
            return False
        self._pinged_at = now
        return True

    def silent_s(self, now: float) -> float:
        """How long the peer has said nothing while this side was awake."""
        if self.heard_at >= self._looked_at:
            self.quiet_s = 0.0
        if now - self._looked_at > LOOK_S:
            self._awake_since = now
        self.quiet_s += min(now - max(self._looked_at, self.heard_at), LOOK_S)
        self._looked_at = now
        return self.quiet_s

    def unheard(self, now: float) -> bool:
        """True if pings have been sent for so long that the peer, were they to arrive, would have heard one."""
        awake_s = now - self._awake_since
        return min(self.unheard_s, awake_s - INTERVAL_S) >= self.usual_limit_s

    def doubtful(self, now: float) -> bool:
        return self.silent_s(now) >= min(LIMIT_S * (1 + self._starvation()), MOST_S)

    def lost(self, now: float) -> bool:
        return self.silent_s(now) >= self.limit_s
