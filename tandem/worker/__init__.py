"""What prefill and decode workers share: settings, the engine's thread, the lease, the life of the process."""

from tandem.worker.engine_thread import EngineThread
from tandem.worker.host import Host, WorkerRole, run_worker
from tandem.worker.settings import WorkerSettings

__all__ = ["EngineThread", "Host", "WorkerRole", "WorkerSettings", "run_worker"]
