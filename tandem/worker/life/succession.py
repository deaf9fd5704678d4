"""Rollouts: a worker replaces a worker of another release such that no gateway is left without workers.

    gateways are replaced first: to be ready they need registered workers of their own release, even unready ones
    ──> the other release's last gateway has gone ──> new workers turn ready ──> the old workers may go

So replacing processes one by one, as Kubernetes does, leaves no gateway without workers. A rollout that has stopped
does not block a worker for ever: after WAIT_S the worker turns ready all the same, and logs the consequence.
Workers of 0.1.0 do not wait. So a worker that is told to stop while they come, in a rollback, stays for a while as long
as gateways of its own release live.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

import structlog

from tandem.registry import Registry, RegistryUnavailable

log = structlog.get_logger(__name__)
CHECK_S = 0.5
# A gateway registers again within this time after Redis has lost its data.
GONE_S = 5.0
WAIT_S = 1800.0


async def succeed(registry: Registry, wait_s: float = WAIT_S) -> None:
    """Returns once no gateway of another release has had a lease for GONE_S (immediately if there is none), or after
    `wait_s`.
    """
    try:
        async with asyncio.timeout(wait_s):
            await _all_gone(registry, wait_s)
    except TimeoutError:
        log.error(
            "ready beside gateways of another release: workers that these use may go now, and leave them with none",
            waited_s=wait_s,
        )


async def stay(registry: Registry, wait_s: float) -> None:
    """Returns once no gateway of this release has a lease; immediately without another release; or after `wait_s`."""
    with suppress(TimeoutError, RegistryUnavailable):
        async with asyncio.timeout(wait_s):
            others = await registry.releases.others()
            if others and await registry.gateways.live():
                found = "; ".join(map(str, others))
                log.warning("goes on for gateways of this release while another comes", found=found, at_most_s=wait_s)
            while others and await registry.gateways.live():
                await asyncio.sleep(CHECK_S)


async def _all_gone(registry: Registry, wait_s: float) -> None:
    now, told, gone_at = asyncio.get_running_loop().time, False, 0.0
    while True:
        try:
            others = [other for other in await registry.releases.others() if other.gateways]
        except RegistryUnavailable:
            await asyncio.sleep(CHECK_S)
            continue
        if not others and now() >= gone_at:
            return
        if others:
            gone_at = now() + GONE_S
        if others and not told:
            told = True
            found = "; ".join(map(str, others))
            log.warning("not ready while gateways of another release serve", found=found, at_most_s=wait_s)
        await asyncio.sleep(CHECK_S)
