"""A worker that replaces one of another release, or is replaced by one: no gateway is left without workers.

    gateways are replaced first, for their probes ask for nothing but workers of their own release
    ──> the last one of the other release has gone ──> workers turn ready ──> those that they replace may go

So replacing processes one by one, as Kubernetes does, leaves no gateway without workers. A rollout that stands
still holds nobody up for ever: after WAIT_S the worker turns ready all the same, and says what that means.
Workers of 0.1.0 wait for nobody. So one that is told to go while they come, by a rollback, goes on for a while as long
as gateways of its own release do.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

import structlog

from tandem.registry import Registry, RegistryUnavailable

log = structlog.get_logger(__name__)
CHECK_S = 0.5
# A gateway registers again within so long after Redis has lost its memory.
GONE_S = 5.0
WAIT_S = 1800.0


async def succeed(registry: Registry, wait_s: float = WAIT_S) -> None:
    """Return once no gateway of another release has a lease, for GONE_S where there was one; or after `wait_s`."""
    try:
        async with asyncio.timeout(wait_s):
            await _all_gone(registry, wait_s)
    except TimeoutError:
        log.error(
            "ready beside gateways of another release: workers that these use may go now, and leave them with none",
            waited_s=wait_s,
        )


async def stay(registry: Registry, wait_s: float) -> None:
    """Return once no gateway of this release has a lease, at once where no other release is here; or after `wait_s`."""
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
