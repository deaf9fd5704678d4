"""Tells the registry of a worker that has died: of what, and by its crash page of whom."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

import structlog

from tandem.crash_page import Death, death_of, page_path
from tandem.registry import Registry, RegistryUnavailable

log = structlog.get_logger(__name__)
REPORT_S = 1.0


async def report_death(settings: Mapping[str, object], cause: str) -> Death | None:
    """Report the death of the worker with these settings. Its page is then known: its next start need not report it."""
    if "crash_dir" not in settings or "worker_id" not in settings:
        return None
    namespace = str(settings.get("namespace", "tandem"))
    path = page_path(Path(str(settings["crash_dir"])), namespace, str(settings["worker_id"]))
    if not path.exists():
        return None
    try:
        death = death_of(path.read_bytes(), cause)
        if death is not None:
            await tell(death, str(settings["redis_url"]), namespace)
            path.unlink(missing_ok=True)
        return death
    except OSError as error:
        log.warning("no crash page", path=str(path), error=str(error))
    except (RegistryUnavailable, TimeoutError) as error:
        log.warning("registry unavailable: a worker's death is not reported", error=str(error))
    return None


async def tell(death: Death, redis_url: str, namespace: str) -> None:
    """
    Raises:
        RegistryUnavailable
    """
    registry = Registry.connect(redis_url, namespace=namespace, timeout=REPORT_S)
    try:
        async with asyncio.timeout(2 * REPORT_S):
            await registry.report_death(death)
    finally:
        await registry.close()
