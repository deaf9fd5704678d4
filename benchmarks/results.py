"""Measurements, and the statistics over them.

one request -> TimedAnswer (when sent, when tokens arrived) -> a workload's figures, once a round -> Figures: the median
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Arrival:
    """A chunk of an answer: seconds on the client's clock, and the tokens in it (a fraction where only their sum over
    the whole answer is known)."""

    at: float
    tokens: float


@dataclass(frozen=True, slots=True)
class TimedAnswer:
    """One streamed answer, as its client saw it. Times in seconds on one clock."""

    sent: float
    arrivals: tuple[Arrival, ...]
    prompt_tokens: int

    @property
    def tokens(self) -> float:
        return sum(arrival.tokens for arrival in self.arrivals)

    @property
    def first(self) -> float:
        return self.arrivals[0].at

    @property
    def done(self) -> float:
        return self.arrivals[-1].at

    @property
    def ttft(self) -> float:
        return self.first - self.sent

    @property
    def gaps(self) -> list[float]:
        """Inter-token latencies: a chunk of several tokens is one gap, as long as its reader waited."""
        return [b.at - a.at for a, b in zip(self.arrivals, self.arrivals[1:], strict=False)]

    @property
    def tpot(self) -> float:
        """Seconds a token behind the first one, on average."""
        return (self.done - self.first) / max(self.tokens - 1, 1)

    def meets(self, ttft: float, itl: float) -> bool:
        return self.ttft <= ttft and all(gap <= itl for gap in self.gaps)


@dataclass(frozen=True, slots=True)
class Metric:
    """One column of a workload's table."""

    name: str
    unit: str
    better: Literal["higher", "lower"] = "higher"

    def ratio(self, value: float, baseline: float) -> float:
        """How many times as good as the baseline: above 1 is better, whichever way the metric points."""
        above, below = (value, baseline) if self.better == "higher" else (baseline, value)
        return above / below if below else math.inf

    def best(self, values: Iterable[float]) -> float:
        return max(values) if self.better == "higher" else min(values)


@dataclass(frozen=True, slots=True)
class Figure:
    """A metric over all rounds."""

    rounds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.rounds)


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least `percent` % of the values do not exceed (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def wall(answers: Sequence[TimedAnswer]) -> float:
    """Seconds from the first request sent to the last token received."""
    return max(answer.done for answer in answers) - min(answer.sent for answer in answers)


def throughput(answers: Sequence[TimedAnswer]) -> float:
    """Output tokens per second, prompts' time included."""
    return sum(answer.tokens for answer in answers) / wall(answers)


def decode_rate(answers: Sequence[TimedAnswer]) -> float:
    """Output tokens per second while every answer was being decoded: after the last first token, before the first end.

    Zero where there was no such time: the first answer ended before the last one began.
    """
    start, end = max(answer.first for answer in answers), min(answer.done for answer in answers)
    tokens = sum(a.tokens for answer in answers for a in answer.arrivals if start < a.at <= end)
    return tokens / (end - start) if end > start else 0.0


def gaps(answers: Sequence[TimedAnswer]) -> list[float]:
    return [gap for answer in answers for gap in answer.gaps]


def goodput(answers: Sequence[TimedAnswer], ttft: float, itl: float) -> float:
    """Share of the requests, 0 to 1, whose first token and every later one came in time (both in seconds)."""
    return sum(answer.meets(ttft, itl) for answer in answers) / len(answers)


def earlier(results: Path, setting: Mapping[str, Any], part: str) -> dict[str, Any]:
    """`part` of the results that an earlier run in the same setting wrote; empty without one."""
    found: dict[str, Any] = json.loads(results.read_text(encoding="utf-8")) if results.is_file() else {}
    same = found.get("setting") == json.loads(json.dumps(setting))
    kept: dict[str, Any] = found[part] if same else {}
    return kept
