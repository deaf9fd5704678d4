"""An engine that steps on the event loop, for simulations: a step takes simulated time, and no thread runs.

A step is computed at its beginning. When its time is over, its outputs are delivered, and then the functions that were
submitted meanwhile run.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from tandem.containment import CrashPage
from tandem.engine import Engine, EngineConfig, SequenceOutput
from tandem.worker.engine.port import Command, EnginePort, Event, OnDeath, OnEvents

T = TypeVar("T")
LEAST_STEP_S = 0.002


class InlineEngine(EnginePort):
    """An engine on the loop's clock: a step takes the time that a null model states, at least LEAST_STEP_S."""

    def __init__(self, config: EngineConfig, crash_page: CrashPage | None = None) -> None:
        self._slept_s = 0.0
        super().__init__(Engine(config, crash_page=crash_page, sleep=self._sleep, now=lambda: self._slept_s))
        self._inbox: deque[Command] = deque()
        self._next: asyncio.Handle | None = None
        self._closed = False
        self._stepping_since: float | None = None

    def now(self) -> float:
        return self._loop.time()

    @property
    def busy_s(self) -> float:
        return 0.0 if self._stepping_since is None else self._loop.time() - self._stepping_since

    def start(self, on_events: OnEvents, on_death: OnDeath) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_events, self._on_death = on_events, on_death
        self._next = self._loop.call_soon(self._turn)

    def beside_step(self, fn: Callable[[Engine], T]) -> T | None:
        return None if self._closed else self._beside(fn)

    @property
    def ended(self) -> bool:
        return self._closed

    def close(self) -> None:
        self._closed = True
        if self._next is not None:
            self._next.cancel()
        self._refuse_inbox()

    def _put(self, commands: list[Command]) -> None:
        self._inbox += commands
        if self._closed:
            self._refuse_inbox()
        elif self._next is None:
            self._next = self._loop.call_soon(self._turn)

    def _refuse_inbox(self) -> None:
        refused, self._inbox = self._inbox, deque()
        self._tell_soon([event for command in refused for event in command.refuse()])

    def _tell_soon(self, events: list[Event]) -> None:
        if events:
            self._loop.call_soon(self._on_events, events)

    def _turn(self) -> None:
        self._next = None
        events: list[Event] = []
        while self._inbox:
            events += self._inbox.popleft().run(self.engine)
        self._tell_soon(events)
        if self._closed or not self.engine.has_work():
            self._measure(0.0)
            return
        self._slept_s = 0.0
        try:
            outputs = self.engine.step()
        except BaseException as error:
            self.close()
            self._on_death(error)
            return
        seconds = max(self._slept_s, LEAST_STEP_S)
        self._stepping_since = self._loop.time()
        self._next = self._loop.call_later(seconds, self._stepped, outputs, seconds)

    def _stepped(self, outputs: list[SequenceOutput], seconds: float) -> None:
        self._stepping_since = None
        self._measure(seconds)
        if outputs:
            self._on_events(outputs)
        if not self._closed:
            self._turn()

    def _sleep(self, seconds: float) -> None:
        self._slept_s += seconds
