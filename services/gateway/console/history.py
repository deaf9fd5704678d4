"""The recent history of the gateway: a point every EVERY_S, from its counters."""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from services.gateway.telemetry import FrontMetrics, Totals
from tandem.catalogue.metrics import GATEWAY

EVERY_S = 2.0
MAX_POINTS = 300
TTFT, ITL = "vllm:time_to_first_token_seconds", "vllm:inter_token_latency_seconds"
Point = dict[str, Any]


class History:
    """The points of the charts, added by `run`. `gauges`: returns present values for each point."""

    def __init__(self, metrics: FrontMetrics, gauges: Callable[[], Point]) -> None:
        self._metrics, self._gauges = metrics, gauges
        self._points: deque[Point] = deque(maxlen=MAX_POINTS)

    async def run(self) -> None:
        """Add points until cancelled."""
        now = asyncio.get_running_loop().time
        before, then = self._metrics.totals(), now()
        while True:
            await asyncio.sleep(EVERY_S)
            totals, at = self._metrics.totals(), now()
            self._points.append({"t": round(at, 3), **self._gauges(), **rates(before, totals, at - then)})
            before, then = totals, at

    def after(self, t: float) -> list[Point]:
        """Returns the points after time `t`."""
        return [point for point in self._points if point["t"] > t]


def rates(before: Totals, now: Totals, seconds: float) -> Point:
    """Returns rates per second between two totals."""

    def per_s(name: str) -> float:
        return round((now.count(name) - before.count(name)) / seconds, 2)

    met, other = (a - b for a, b in zip(now.outcomes, before.outcomes, strict=True))
    return {
        "requests_per_s": per_s("tandem_requests"),
        "tokens_per_s": per_s("vllm:generation_tokens"),
        "goodput_per_s": per_s("tandem_goodput_tokens"),
        "met": round(met / (met + other), 4) if met + other else None,
        **{f"ttft_p{share}": _quantile(TTFT, before, now, share) for share in (50, 95)},
        **{f"itl_p{share}": _quantile(ITL, before, now, share) for share in (50, 99)},
    }


def _quantile(name: str, before: Totals, now: Totals, percent: int) -> float | None:
    """Returns a histogram's quantile as Prometheus computes it; None without observations."""
    counts = [a - b for a, b in zip(now.buckets(name), before.buckets(name), strict=True)]
    return quantile(counts, GATEWAY[name].buckets, percent / 100)


def quantile(counts: Sequence[float], bounds: Sequence[float], share: float) -> float | None:
    """Returns a quantile, values spread evenly within buckets. `counts`: cumulative, one more than `bounds`."""
    if not counts[-1]:
        return None
    rank = share * counts[-1]
    at = bisect_left(counts, rank)
    if at == len(bounds):
        return bounds[-1]
    (low, high), (less, more) = list(pairwise((0.0, *bounds)))[at], list(pairwise((0.0, *counts)))[at]
    return round(low + (high - low) * (rank - less) / (more - less), 6)
