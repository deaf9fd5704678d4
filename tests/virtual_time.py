"""An event loop whose time passes only when nothing else is to be done: tests of waits take no time, on any machine.

For code that waits by its loop alone. A thread, a process or a socket that is waited for would be outrun.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class VirtualLoop(asyncio.SelectorEventLoop):
    """Jumps to its next timer where no callback is ready."""

    def __init__(self) -> None:
        super().__init__()
        self.virtual = 0.0

    def time(self) -> float:
        return self.virtual

    def _run_once(self) -> None:
        if not self._ready:
            times = [timer.when() for timer in self._scheduled if not timer.cancelled()]
            self.virtual = max(self.virtual, min(times, default=self.virtual))
        super()._run_once()


def run(scene: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Returns what `scene()` does, run on a loop of its own."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(scene())


def in_virtual_time(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Makes a test of a coroutine function."""

    @wraps(test)
    def runs(*args: P.args, **kwargs: P.kwargs) -> None:
        run(lambda: test(*args, **kwargs))

    return runs
