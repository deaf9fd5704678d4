"""Fleets of null engines: as processes, simulated, and with perfect knowledge. Benchmarks of routing may enter."""

from typing import TYPE_CHECKING

from benchmarks.fleet.perfect import SimulatedWorker, hit_rate, perfect_hit_rate, pooled_hit_rate
from benchmarks.fleet.processes import MODEL, NullFleet, running, tokens_read, worker_tokens
from tandem.lazy import lazily

if TYPE_CHECKING:
    from benchmarks.fleet.simulated import in_made_up_time, simulate

__all__ = [
    "MODEL", "NullFleet", "SimulatedWorker", "hit_rate", "in_made_up_time", "perfect_hit_rate", "pooled_hit_rate",
    "running", "simulate", "tokens_read", "worker_tokens",
]  # fmt: skip

__getattr__ = lazily(__name__, {"simulated": ("in_made_up_time", "simulate")})
