"""The common part of prefill and decode workers: settings, engine, KV, work, life. Services and commands may enter.

    engine/   the engine's interface for coroutines
    kv/       links to peers, blocks fetched and published, tiers below the cache
    work/     gateways' streams and their requests
    life/     a worker from start to end, and its process

Settings can be imported without torch, to check them; all other names are imported at first use.
"""

from typing import TYPE_CHECKING

from tandem.lazy import lazily
from tandem.worker.settings import FOLLOWED, WorkerSettings

if TYPE_CHECKING:
    from tandem.worker.context import RunningServer, WorkerContext, WorkerPorts, WorkerService
    from tandem.worker.engine import (
        Added,
        Ended,
        EngineDied,
        EnginePort,
        EngineStuck,
        EngineThread,
        Event,
        InlineEngine,
    )
    from tandem.worker.errors import SequenceFailed
    from tandem.worker.kv import Holder, KVFetcher, KVLinks, LinkState, LinkTo, fell_back
    from tandem.worker.life.build import Worker
    from tandem.worker.life.process import (
        loaded_engine,
        probed_worker,
        process_ports,
        run_measured,
        run_worker,
        tuned_by,
    )
    from tandem.worker.serving import BUG, Entry, Streams, SuspectTurns, WorkService, failure_of

__all__ = [
    "BUG",
    "FOLLOWED",
    "Added",
    "Ended",
    "EngineDied",
    "EnginePort",
    "EngineStuck",
    "EngineThread",
    "Entry",
    "Event",
    "Holder",
    "InlineEngine",
    "KVFetcher",
    "KVLinks",
    "LinkState",
    "LinkTo",
    "RunningServer",
    "SequenceFailed",
    "Streams",
    "SuspectTurns",
    "WorkService",
    "Worker",
    "WorkerContext",
    "WorkerPorts",
    "WorkerService",
    "WorkerSettings",
    "failure_of",
    "fell_back",
    "loaded_engine",
    "probed_worker",
    "process_ports",
    "run_measured",
    "run_worker",
    "tuned_by",
]
_WITH_TORCH = {
    "context": ("RunningServer", "WorkerContext", "WorkerPorts", "WorkerService"),
    "engine": (
        "Added", "Ended", "EngineDied", "EnginePort", "EngineStuck", "EngineThread", "Event", "InlineEngine",
    ),
    "errors": ("SequenceFailed",),
    "kv": ("Holder", "KVFetcher", "KVLinks", "LinkState", "LinkTo", "fell_back"),
    "life.build": ("Worker",),
    "life.process": ("loaded_engine", "probed_worker", "process_ports", "run_measured", "run_worker", "tuned_by"),
    "serving": ("BUG", "Entry", "Streams", "SuspectTurns", "WorkService", "failure_of"),
}  # fmt: skip
__getattr__ = lazily(__name__, _WITH_TORCH)
