"""A worker that comes to replace one of another release: not ready before the gateways of that release have gone.

    gateways are replaced first, for their probes ask for nothing but workers of their own release
    ──> the last one of the other release has gone ──> workers turn ready ──> those that they replace may go

So whoever replaces processes one by one, as Kubernetes does, leaves no gateway without workers.
"""

from __future__ import annotations

import asyncio

import structlog

from tandem.registry import Registry, RegistryUnavailable

log = structlog.get_logger(__name__)
CHECK_S = 0.5
# A gateway registers again within so long after Redis has lost its memory.
GONE_S = 5.0


async def succeed(registry: Registry) -> None:
    """Return once no gateway of another release has a lease, for GONE_S where there was one."""
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
            log.warning("not ready while gateways of another release serve", found="; ".join(map(str, others)))
        await asyncio.sleep(CHECK_S)
