"""Charges a tenant's limits before a request begins, and refunds at its end what was not used.

While Redis is gone nothing is counted and no client is refused: the limits guard shares, not the cluster.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any

import structlog

from services.gateway.access.access import ANYONE, Caller
from services.gateway.errors import InvalidRequest, RateLimited
from tandem.registry import Limits, RegistryUnavailable, Taken, TenantLimits
from tandem.security import Tier

log = structlog.get_logger(__name__)
LACKING = {
    "requests": ("rate_limit_exceeded", "requests per minute"),
    "tokens": ("rate_limit_exceeded", "tokens per minute"),
    "concurrent": ("rate_limit_exceeded", "requests at once"),
    "budget": ("insufficient_quota", "today's budget"),
}


class Allowances:
    """`take` before a request begins, `settle` after its end."""

    def __init__(self, limits: TenantLimits, in_background: Callable[[Coroutine[Any, Any, None]], None]) -> None:
        self._limits, self._in_background = limits, in_background

    async def take(
        self, client: Caller, tenant: str, request_id: str, prompt_tokens: int, new_tokens: int, seconds: float
    ) -> Taken | None:
        """Returns what was charged; None if nothing is counted.

        Args:
            new_tokens: the most that it may generate.
            seconds: the longest that it may run.

        Raises:
            RateLimited: names the limit and when to retry.
            InvalidRequest: more tokens than its tier has in a minute.
        """
        if client is ANYONE:
            return None
        tier, tokens = client.tier, prompt_tokens + new_tokens
        if tier.tokens_per_minute is not None and tokens > tier.tokens_per_minute:
            message = f"the request may come to {tokens} tokens, and its tier has {tier.tokens_per_minute} per minute"
            raise InvalidRequest(message, "max_tokens", "request_too_large")
        cost = tier.cost(prompt_tokens, new_tokens)
        try:
            taken = await self._limits.take(
                tenant, _limits(tier), request_id=request_id, tokens=tokens, cost=cost, ttl=seconds + 1.0
            )
        except RegistryUnavailable as error:
            log.warning("limits are not counted: registry unavailable", error=str(error))
            return None
        if taken.lacks:
            code, what = LACKING[taken.lacks]
            raise RateLimited(f"tenant {tenant} has no more {what} left", code, taken.wait_s, headers_of(taken))
        return taken

    @asynccontextmanager
    async def one(self, client: Caller, tenant: str, request_id: str, seconds: float) -> AsyncIterator[dict[str, str]]:
        """Count a request without tokens while the block runs. Yields headers that report the tenant's limits.

        Raises RateLimited.
        """
        taken = await self.take(client, tenant, request_id, 0, 0, seconds)
        try:
            yield headers_of(taken) if taken else {}
        finally:
            if taken:
                self.settle(client, taken)

    def settle(
        self, client: Caller, taken: Taken, prompt_tokens: int = 0, completion_tokens: int = 0, cached_tokens: int = 0
    ) -> None:
        cost = client.tier.cost(prompt_tokens, completion_tokens, cached_tokens)

        async def settle() -> None:
            with suppress(RegistryUnavailable):  # retried later
                await self._limits.settle(taken, prompt_tokens, completion_tokens, cost, cached_tokens)

        self._in_background(settle())


def check_tier(tier: Tier, prompt_tokens: int, max_tokens: int | None, param: str) -> None:
    """Raises InvalidRequest: a prompt or an answer longer than the tier allows."""
    if tier.max_prompt_tokens is not None and prompt_tokens > tier.max_prompt_tokens:
        raise InvalidRequest(f"{param}: its tier allows {tier.max_prompt_tokens} tokens, got {prompt_tokens}", param)
    if tier.max_new_tokens is not None and (max_tokens or 0) > tier.max_new_tokens:
        message = f"max_tokens: its tier allows {tier.max_new_tokens}, got {max_tokens}"
        raise InvalidRequest(message, "max_tokens")


def headers_of(taken: Taken) -> dict[str, str]:
    """Returns the rate-limit headers by OpenAI's names."""
    said: dict[str, str] = {}
    for name, limit, left, full_s in (
        ("requests", taken.limits.requests_per_minute, taken.requests_left, taken.requests_full_s),
        ("tokens", taken.limits.tokens_per_minute, taken.tokens_left, taken.tokens_full_s),
    ):
        if limit is not None:
            said[f"x-ratelimit-limit-{name}"] = str(limit)
            said[f"x-ratelimit-remaining-{name}"] = str(left)
            said[f"x-ratelimit-reset-{name}"] = f"{full_s:.3f}s"
    return said


def _limits(tier: Tier) -> Limits:
    return Limits(tier.requests_per_minute, tier.tokens_per_minute, tier.concurrent_requests, tier.daily_budget)
