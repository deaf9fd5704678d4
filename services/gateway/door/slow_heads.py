"""Clients that take too long over the head of a request. A client between two requests is not one of them.

    connected ────────────────────────────────┐
    answered ── a byte of the next request ───┴── the head's timeout ──> late, unless its request has begun

Hyper has one timeout for a head and the pause before it, so it is set to the pause's.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

# How long a connection is kept between two requests: longer than load balancers keep theirs (60 s), which would
# otherwise send requests on connections that are being closed.
KEPT_S = 75.0
# The kernel's clock ticks: data this soon after an answer may belong to the request that was answered.
TICKS_S = 0.05


class SlowHeads:
    """The state of clients, by address, when last examined."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._answered: dict[Any, float] = {}  # when its last request ended
        self._begun: dict[Any, float] = {}  # when a head was first awaited

    def answered(self, client: Any, now: float) -> None:
        self._answered[client] = now

    def is_late(self, client: Any, came: float, now: float) -> bool:
        """True if this client, which has no running request, took too long. `came`: when its last data arrived."""
        answered = self._answered.get(client)
        if answered is not None:
            if self._begun.get(client, answered) <= answered or came <= answered + TICKS_S:
                self._begun.pop(client, None)
            if came <= answered + TICKS_S:
                return False
        return now - self._begun.setdefault(client, now) >= self._timeout_s

    def forget_others(self, clients: Collection[Any], since: float) -> None:
        """Forget clients that are not in `clients`, except those answered after `since`."""
        for known in (self._answered, self._begun):
            for gone in known.keys() - clients:
                if known[gone] < since:
                    del known[gone]
