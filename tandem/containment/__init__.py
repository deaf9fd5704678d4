"""Limits to a crash's damage: helper processes, deep stacks, a page that outlives its process. Anyone may enter."""

from typing import TYPE_CHECKING

from tandem.lazy import lazily

if TYPE_CHECKING:
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
__getattr__ = lazily(
    __name__,
    {
        "crash_page": (
            "COMPUTING",
            "NOBODY",
            "RAISED",
            "SUSPECT",
            "CrashPage",
            "Death",
            "cause_of",
            "death_of",
            "oom_kills_in",
            "page_path",
        ),
        "deep_stack": ("on_deep_stack",),
        "oom_kills": (
            "OomKills",
            "oom_kills_here",
        ),
        "sandbox": (
            "CallDied",
            "CallExhausted",
            "CallFailed",
            "Sandbox",
            "SandboxBusy",
        ),
        "sandboxed": ("Bounds",),
    },
)
