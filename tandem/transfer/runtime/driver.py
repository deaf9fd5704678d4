"""Drivers of a link's ends: a thread for each (`threads.py`), or an event loop for all (`loop.py`)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol


class Task(Protocol):
    """Something that a driver steps until it ends."""

    name: str

    def step(self) -> float | None:
        """Does what can be done without waiting. Seconds until it must be stepped again, or None: it has ended."""

    def idle(self) -> bool:
        """Nothing is left to do; from now on it is woken when there is."""

    def wait(self, timeout: float) -> None:
        """Until there may be something to do."""

    def watch(self, ready: Callable[[], None]) -> None:
        """Instead of waiting: `ready` is called whenever there may be something to do."""


class Running(Protocol):
    @property
    def alive(self) -> bool: ...
    def join(self) -> None:
        """After the task was asked to end: waits, for a bounded time, until it has."""


class Driver(Protocol):
    """concurrent: whether other threads use a link while it runs."""

    concurrent: bool

    def now(self) -> float: ...
    def start(self, task: Task) -> Running: ...
    def pause(self, changed: threading.Condition, seconds: float) -> None:
        """Lets others work for a moment, `changed` being held. Raises TransferError where nobody else could."""
