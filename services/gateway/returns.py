"""Retry-after times of refused requests, spread so that clients return as fast as there is room for them.

    refused now      told the time until there is room for one, behind all that were told so before
    told too long    from the beginning again: clients that wait longer than MOST_S are few, and many never come

If all were told the same, nothing would come for a while, and then all of them at once.
"""

from __future__ import annotations

from math import inf

MOST_S = 60.0
# The least time between two returns where no rate is known.
APART_S = 0.02


class Returns:
    """The return times given to clients, on the event loop's clock."""

    def __init__(self) -> None:
        self._last = -inf

    def wait_s(self, room_s: float, each_s: float, now: float) -> float:
        """Returns the retry-after of a refused request in seconds.

        Args:
            room_s: seconds until there is room for one, if no other comes.
            each_s: seconds until there is room for another one like it.
        """
        first = now + max(room_s, 0.0)
        self._last = max(first, self._last + max(each_s, APART_S))
        if self._last > first + MOST_S:
            self._last = first
        return self._last - now
