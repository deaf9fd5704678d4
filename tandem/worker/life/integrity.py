"""A check that a worker holds exactly what its requests need: blocks, sequences, and its side of KV transfers."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from tandem.engine import Engine
from tandem.process import IntegrityReport
from tandem.worker.engine import EnginePort


class SequenceHolder(Protocol):
    def request_ids(self) -> Collection[str]: ...

    def check_integrity(self) -> IntegrityReport: ...


async def check_worker(engine: EnginePort, service: SequenceHolder) -> IntegrityReport:
    """Checks the engine and that each of its sequences belongs to a request, perhaps one that is being released."""
    ids = set(await engine.call(lambda engine: engine.request_ids()))
    leaked = ids - set(service.request_ids())
    stats = await engine.call(lambda engine: engine.stats())
    held = {
        "sequences": stats.num_waiting + stats.num_running + stats.num_reserved,
        "blocks": stats.num_blocks - stats.free_blocks,
    }
    broken = await engine.call(_broken)
    unaccounted = (f"{request_id}: in the engine, but no request's" for request_id in sorted(leaked))
    return IntegrityReport(held, (*broken, *unaccounted)) + service.check_integrity()


def _broken(engine: Engine) -> list[str]:
    try:
        engine.check_integrity()
    except AssertionError as error:
        return [str(error)]
    return []
