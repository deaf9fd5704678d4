"""Limits of tenants, counted in Redis, so that they hold across gateways.

    take      before a request begins: one of its requests per minute, tokens for prompt and answer, a place among
              those that run concurrently, and their cost of the day's budget; all or nothing, as one atomic step
    settle    at its end: what it did not use is refunded to the tenant, what it used is counted

A request whose gateway died no longer counts as running; its tokens of the minute are not refunded.
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
    """A tenant's limits; None: no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent_requests: int | None = None
    daily_budget: float | None = None

    def arguments(self) -> tuple[str, ...]:
        every = self.requests_per_minute, self.tokens_per_minute, self.concurrent_requests, self.daily_budget
        return tuple("" if limit is None else str(limit) for limit in every)


@dataclass(frozen=True, slots=True)
class Taken:
    """Result of a request's `take`. `*_full_s`: seconds until a bucket is full again; `*_left`: -1 without a limit."""

    request: str
    tenant: str
    limits: Limits
    tokens: int
    cost: float
    lacks: Lack  # the limit that is exhausted; empty: the request may begin
    wait_s: float
    requests_left: int
    requests_full_s: float
    tokens_left: int
    tokens_full_s: float
    day: str


@dataclass(frozen=True, slots=True)
class Usage:
    """The usage of one tenant today (UTC)."""

    requests: int
    prompt_tokens: int
    cached_tokens: int  # the cached part of the prompt tokens
    completion_tokens: int
    cost: float  # a request that still runs counts with the most it may cost

    @classmethod
    def of(cls, flat: Sequence[Any]) -> Usage:
        """Parses Redis's answer: name, value, name, value ...

        Raises:
            MISREAD: a value is no number.
        """
        found = dict(zip(flat[::2], flat[1::2], strict=True))
        counted = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens")
        return cls(**{name: int(found.get(name, 0)) for name in counted}, cost=max(0.0, float(found.get("cost", 0))))


class TenantLimits:
    """Charges requests of this client to their tenants' limits."""

    def __init__(
        self, connection: RegistryConnection, memory: RedisMemory, late: LateReleases, unreadable: UnreadableRows
    ) -> None:
        self._connection, self._memory, self._late, self._unreadable = connection, memory, late, unreadable
        # Requests whose "take" may be executed a second time, as a late copy of the call is still on its way.
        self._doubtful: set[str] = set()

    async def take(
        self, tenant: str, limits: Limits, *, request_id: str, tokens: int, cost: float, ttl: float
    ) -> Taken:
        """Charges the most that a request may use to its tenant's limits. If no limit lacks, `settle` must follow."""
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
        """Counts what an ended request used and refunds the rest of what was taken."""
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
