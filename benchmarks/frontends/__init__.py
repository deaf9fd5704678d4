"""Gateways and routers side by side: each with one backend that computes nothing, and clients that hardly work.

clients ── HTTP ──> the front, a process of its own ──> backend
   └───────────────── one process, one clock ──────────────┘
"""

from benchmarks.frontends.clients import Load
from benchmarks.frontends.fronts import FRONTS, Front, Running
from benchmarks.frontends.pace import Pace

__all__ = ["FRONTS", "Front", "Load", "Pace", "Running"]
