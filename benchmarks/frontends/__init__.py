"""Gateways and routers side by side, each with a backend that computes nothing. benchmarks.gateway may enter.

clients ── HTTP ──> the front, a process of its own ──> backend
   └───────────────── one process, one clock ──────────────┘
"""

from benchmarks.frontends.clients import StreamLoad
from benchmarks.frontends.fronts import FRONTS, Front, RunningFront
from benchmarks.frontends.pace import BackendPace

__all__ = ["FRONTS", "BackendPace", "Front", "RunningFront", "StreamLoad"]
