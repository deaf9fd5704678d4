"""Limits of tenants, counted in Redis, so that it holds across gateways.

    take      before a request begins: one of its requests per minute, tokens for prompt and answer, a place among
              those that run at once, and their cost of the day's budget; all or nothing, as one atomic step
    settle    at its end: what it did not use is the tenant's again, what it used is counted

A request whose gateway died is inside no longer; its tokens are lost to the minute.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

Lack: TypeAlias = Literal["", "requests", "tokens", "concurrent", "budget"]


@dataclass(frozen=True, slots=True)
class Limits:
    """None where there is none."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent_requests: int | None = None
    daily_budget: float | None = None

    def arguments(self) -> tuple[str, ...]:
        every = self.requests_per_minute, self.tokens_per_minute, self.concurrent_requests, self.daily_budget
        return tuple("" if limit is None else str(limit) for limit in every)


@dataclass(frozen=True, slots=True)
class Taken:
    """Result of a request's `take`. Seconds until a bucket is full again; -1 left where there is no limit."""

    request: str
    tenant: str
    limits: Limits
    tokens: int
    cost: float
    lacks: Lack  # empty: it may begin
    wait_s: float
    requests_left: int
    requests_full_s: float
    tokens_left: int
    tokens_full_s: float
    day: str


@dataclass(frozen=True, slots=True)
class Usage:
    """Use by one tenant, today (UTC)."""

    requests: int
    prompt_tokens: int
    cached_tokens: int  # of the prompts'
    completion_tokens: int
    cost: float  # of requests that run still, the most that they may come to

    @classmethod
    def of(cls, flat: Sequence[Any]) -> Usage:
        """From Redis's names and values in turns.

        Raises:
            MISREAD: a value is no number.
        """
        found = dict(zip(flat[::2], flat[1::2], strict=True))
        counted = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens")
        return cls(**{name: int(found.get(name, 0)) for name in counted}, cost=max(0.0, float(found.get("cost", 0))))
