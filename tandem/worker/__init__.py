"""The common part of prefill and decode workers: settings, engine, lease, process. They and commands may enter.

Settings are there without torch, for those who only check them; the rest is imported when it is asked for.
"""

from typing import TYPE_CHECKING

from tandem.lazy import lazily
from tandem.worker.settings import FOLLOWED, WorkerSettings

if TYPE_CHECKING:
    from tandem.worker.build import RunningServer, Worker, WorkerContext, WorkerPorts, WorkerService
    from tandem.worker.engine_inline import InlineEngine
    from tandem.worker.engine_port import Added, Ended, EngineDied, EnginePort, EngineStuck, Event
    from tandem.worker.engine_thread import EngineThread
    from tandem.worker.errors import SequenceFailed
    from tandem.worker.fetching import Holder, KVFetcher, LinkTo
    from tandem.worker.kv_links import KVLinks
    from tandem.worker.links import LinkState, fell_back
    from tandem.worker.process import (
        loaded_engine,
        probed_worker,
        process_ports,
        run_measured,
        run_worker,
        tuned_by,
    )
    from tandem.worker.streams import Streams
    from tandem.worker.suspects import SuspectTurns
    from tandem.worker.work import BUG, Entry, WorkService, failure_of

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
    "build": ("RunningServer", "Worker", "WorkerContext", "WorkerPorts", "WorkerService"),
    "engine_inline": ("InlineEngine",),
    "engine_port": ("Added", "Ended", "EngineDied", "EnginePort", "EngineStuck", "Event"),
    "engine_thread": ("EngineThread",),
    "errors": ("SequenceFailed",),
    "fetching": ("Holder", "KVFetcher", "LinkTo"),
    "kv_links": ("KVLinks",),
    "links": ("LinkState", "fell_back"),
    "process": ("loaded_engine", "probed_worker", "process_ports", "run_measured", "run_worker", "tuned_by"),
    "streams": ("Streams",),
    "suspects": ("SuspectTurns",),
    "work": ("BUG", "Entry", "WorkService", "failure_of"),
}
__getattr__ = lazily(__name__, _WITH_TORCH)
