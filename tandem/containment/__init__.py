"""Bounds on what a crash costs: helper processes, deep stacks, a page that outlives a process. Anyone may enter."""

from tandem.containment.crash_page import (
    COMPUTING,
    NOBODY,
    RAISED,
    SUSPECT,
    CrashPage,
    Death,
    cause_of,
    death_of,
    oom_kills_in,
    page_path,
)
from tandem.containment.deep_stack import on_deep_stack
from tandem.containment.oom_kills import OomKills, oom_kills_here
from tandem.containment.sandbox import CallDied, CallExhausted, CallFailed, Sandbox, SandboxBusy
from tandem.containment.sandboxed import Bounds

__all__ = [
    "COMPUTING",
    "NOBODY",
    "RAISED",
    "SUSPECT",
    "Bounds",
    "CallDied",
    "CallExhausted",
    "CallFailed",
    "CrashPage",
    "Death",
    "OomKills",
    "Sandbox",
    "SandboxBusy",
    "cause_of",
    "death_of",
    "on_deep_stack",
    "oom_kills_here",
    "oom_kills_in",
    "page_path",
]
