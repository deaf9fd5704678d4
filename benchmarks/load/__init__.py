"""The load that a server gets: jobs over HTTP, workloads of them, neighbours beside. All of benchmarks may enter."""

from benchmarks.load.http import Job, LoadClient, PeerError, closed_loop, events, in_batches, open_loop, read_answer
from benchmarks.load.noise import beside
from benchmarks.load.workloads import Workload, all_workloads, disturbed, prompt

__all__ = [
    "Job", "LoadClient", "PeerError", "Workload", "all_workloads", "beside", "closed_loop", "disturbed", "events",
    "in_batches", "open_loop", "prompt", "read_answer",
]  # fmt: skip
