"""Gateways and routers side by side: each with one backend that computes nothing, and clients that hardly work.

clients ── HTTP ──> the front, a process of its own ──> backend
   └───────────────── one process, one clock ──────────────┘
"""

from benchmarks.frontends.clients import StreamLoad
from benchmarks.frontends.fronts import FRONTS, Front, RunningFront
from benchmarks.frontends.pace import BackendPace

__all__ = ["FRONTS", "BackendPace", "Front", "RunningFront", "StreamLoad"]
