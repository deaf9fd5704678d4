"""Reports a worker's death to the registry: the cause and, from its crash page, the suspects. Ends its lease."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import structlog

from tandem.containment import Death, death_of, page_path
from tandem.liveness import gone_here
from tandem.registry.errors import RegistryUnavailable
from tandem.registry.registry import Registry

log = structlog.get_logger(__name__)
REPORT_S = 1.0


async def report_death(settings: Mapping[str, object], cause: str) -> Death | None:
    """Reports the death of a worker whose process has just ended: publishes its crash page and ends its lease, so that
    its next start, at another port, does not have to wait. `settings`: the worker's."""
    if "worker_id" not in settings:
        return None
    death = await report_page(settings, cause)
    try:
        async with _registry_of(settings) as registry:
            await end_lease_of_dead(registry, str(settings["worker_id"]), gone_here)
    except (RegistryUnavailable, TimeoutError) as error:
        log.warning("registry unavailable: a dead worker's lease ends by itself", error=str(error))
    return death


async def report_page(settings: Mapping[str, object], cause: str) -> Death | None:
    """Publishes the crash page that a dead worker left, if any, and deletes the page. `settings`: the worker's."""
    if "crash_dir" not in settings:
        return None
    path = page_path(Path(str(settings["crash_dir"])), _namespace(settings), str(settings["worker_id"]))
    if not path.exists():
        return None
    try:
        death = death_of(path.read_bytes(), cause)
        if death is not None:
            async with _registry_of(settings) as registry:
                await registry.report_death(death)
            path.unlink(missing_ok=True)
        return death
    except OSError as error:
        log.warning("no crash page", path=str(path), error=str(error))
    except (RegistryUnavailable, TimeoutError) as error:
        log.warning("registry unavailable: a worker's death is not reported", error=str(error))
    return None


async def end_lease_of_dead(registry: Registry, worker_id: str, is_gone: Callable[[str], bool]) -> bool:
    """Ends a worker's lease and all that depends on it if `is_gone(process)`. Returns True if a lease ended.

    Raises RegistryUnavailable.
    """
    gone = [w.info for w in await registry.workers() if w.info.worker_id == worker_id and is_gone(w.info.process)]
    for info in gone:
        await registry.leases.deregister(worker_id, info.incarnation)
    return bool(gone)


@asynccontextmanager
async def _registry_of(settings: Mapping[str, object]) -> AsyncIterator[Registry]:
    """Yields a client of the worker's registry, for a short time."""
    registry = Registry.connect(str(settings["redis_url"]), namespace=_namespace(settings), timeout=REPORT_S)
    try:
        async with asyncio.timeout(2 * REPORT_S):
            yield registry
    finally:
        await registry.close()


def _namespace(settings: Mapping[str, object]) -> str:
    return str(settings.get("namespace", "tandem"))
