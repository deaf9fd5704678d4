"""Limits of tenants, counted in Redis, so that it holds across gateways.

    take      before a request begins: one of its requests per minute, tokens for prompt and answer, a place among
              those that run at once, and their cost of the day's budget; all or nothing, as one atomic step
    settle    at its end: what it did not use is the tenant's again, what it used is counted

A request whose gateway died is inside no longer; its tokens are lost to the minute.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias

from tandem.registry.errors import RegistryUnavailable
from tandem.registry.wire import LateReleases, RedisMemory, RegistryConnection, UnreadableRows, milliseconds

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


class TenantLimits:
    """Limits of tenants, as this client takes from them for requests."""

    def __init__(
        self, connection: RegistryConnection, memory: RedisMemory, late: LateReleases, unreadable: UnreadableRows
    ) -> None:
        self._connection, self._memory, self._late, self._unreadable = connection, memory, late, unreadable
        # Takings that may be made once more: what was sent is late.
        self._doubtful: set[str] = set()

    async def take(
        self, tenant: str, limits: Limits, *, request_id: str, tokens: int, cost: float, ttl: float
    ) -> Taken:
        """Take what a request may come to from its tenant's limits. Where nothing lacks, `settle` follows."""
        request = self._memory.name_for(request_id)
        every, lines = limits.arguments(), self._connection.lines
        try:
            lacks, wait, requests, requests_full, left, left_full, day = await self._memory.call(
                "take", tenant, request, milliseconds(ttl), *every, tokens, repr(cost)
            )
        except BaseException:
            self._late.add("settle", tenant, request, "0", every[1], str(tokens), "0", "0", "0", "1", "0")
            raise
        if self._connection.lines != lines:
            self._doubtful.add(request)
        return Taken(
            request, tenant, limits, tokens, cost, lacks, wait / 1000, requests, requests_full / 1000, left,
            left_full / 1000, day,
        )  # fmt: skip

    async def settle(
        self, taken: Taken, prompt_tokens: int, completion_tokens: int, cost: float, cached_tokens: int = 0
    ) -> None:
        """The request has ended and used so much."""
        unused = max(taken.tokens - prompt_tokens - completion_tokens, 0)
        _, per_minute, _, _ = taken.limits.arguments()
        said = taken.tenant, taken.request, taken.day, per_minute, str(unused), repr(taken.cost - cost)
        doubtful = str(int(taken.request in self._doubtful))
        self._doubtful.discard(taken.request)
        arguments = *said, str(prompt_tokens), str(completion_tokens), doubtful, str(cached_tokens)
        try:
            await self._connection.call("settle", *arguments)
        except (RegistryUnavailable, asyncio.CancelledError):
            self._late.add("settle", *arguments)
            raise

    async def usage(self, tenant: str) -> Usage:
        flat = await self._connection.call("usage", tenant)
        return self._unreadable.read("usage", tenant, partial(Usage.of, flat), Usage.of(()))
