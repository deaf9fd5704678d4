"""Failure detection: by a peer's silence, a process's starvation, and the kernel of a host. Anyone may enter."""

from tandem.liveness.same_host import dead_here, gone_here, this_process
from tandem.liveness.silence import MOST_S, QUIET, Liveness, Vitals, stretched
from tandem.liveness.starvation import CpuPressure, Starvation, no_pressure

__all__ = [
    "MOST_S",
    "QUIET",
    "CpuPressure",
    "Liveness",
    "Starvation",
    "Vitals",
    "dead_here",
    "gone_here",
    "no_pressure",
    "stretched",
    "this_process",
]
