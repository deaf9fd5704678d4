"""Is the peer alive? Silence is noticed from both sides, without a clock of its own.

Each side sends a PING once it has sent nothing for `interval` seconds, and answers a PING with a PONG. A side that has
heard no byte for `limit` seconds holds its peer for dead or frozen. Because both sides ping unasked, a direction
crowded with KV blocks never hides the life of the other.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Liveness:
    heard_at: float
    sent_at: float
    interval: float = 0.3
    limit: float = 1.25

    def due_s(self, now: float) -> float:
        """Seconds until either may be true next."""
        return max(0.0, min(self.sent_at + self.interval, self.heard_at + self.limit) - now)

    def ping_due(self, now: float) -> bool:
        return now >= self.sent_at + self.interval

    def lost(self, now: float) -> bool:
        return now >= self.heard_at + self.limit
