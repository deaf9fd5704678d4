"""Drivers of a link's ends: a thread for each (`threads.py`), or an event loop for all (`loop.py`)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol


class Task(Protocol):
    """Something that a driver steps until it ends."""

    name: str

    def step(self) -> float | None:
        """Does what needs no waiting.

        Returns the seconds until the next step is due, or None once the task has ended.
        """

    def idle(self) -> bool:
        """Prepares for waiting, so that new work wakes the task. Returns True if there is nothing to do now."""

    def wait(self, timeout: float) -> None:
        """Waits until there may be something to do, or `timeout` seconds have passed."""

    def watch(self, ready: Callable[[], None]) -> None:
        """Has `ready` called whenever there may be something to do; replaces `wait` on an event loop."""


class Running(Protocol):
    @property
    def alive(self) -> bool: ...
    def join(self) -> None:
        """Waits, for a bounded time, until a task that was told to end has ended."""


class Driver(Protocol):
    """Runs tasks. concurrent: True if other threads use a link while its task runs."""

    concurrent: bool

    def now(self) -> float: ...
    def start(self, task: Task) -> Running: ...
    def pause(self, changed: threading.Condition, seconds: float) -> None:
        """Releases `changed` for a moment, so that other threads work. Raises TransferError if there are none."""
