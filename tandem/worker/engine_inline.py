"""An engine that steps on the event loop: a simulation's, where a step takes simulated time and no thread runs.

A step is computed at its beginning; its outputs come, and what was submitted meanwhile runs, when its time is over.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from tandem.engine import Engine, EngineConfig, SequenceOutput
from tandem.worker.engine_port import EnginePort, OnDeath, OnOutputs, Submission

T = TypeVar("T")
LEAST_STEP_S = 0.002


class InlineEngine(EnginePort):
    """A null engine's step takes the time it states, every other LEAST_STEP_S, by the loop's clock."""

    def __init__(self, config: EngineConfig) -> None:
        self._slept_s = 0.0
        super().__init__(Engine(config, sleep=self._sleep, now=lambda: self._slept_s))
        self._inbox: deque[Submission[Any]] = deque()
        self._next: asyncio.Handle | None = None
        self._closed = False
        self._stepping_since: float | None = None

    @property
    def busy_s(self) -> float:
        return 0.0 if self._stepping_since is None else self._loop.time() - self._stepping_since

    def start(self, on_outputs: OnOutputs, on_death: OnDeath) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_outputs, self._on_death = on_outputs, on_death
        self._next = self._loop.call_soon(self._turn)

    def submit(self, fn: Callable[[Engine], T]) -> Future[T]:
        submission = Submission(fn)
        if self._closed:
            submission.refuse()
            return submission.future
        self._inbox.append(submission)
        if self._next is None:
            self._next = self._loop.call_soon(self._turn)
        return submission.future

    def beside_step(self, fn: Callable[[Engine], T]) -> T | None:
        return None if self._closed else self._beside(fn)

    def close(self) -> None:
        self._closed = True
        if self._next is not None:
            self._next.cancel()
        while self._inbox:
            self._inbox.popleft().refuse()

    def _turn(self) -> None:
        self._next = None
        while self._inbox:
            self._inbox.popleft().run(self.engine)
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
            self._on_outputs(outputs)
        if not self._closed:
            self._turn()

    def _sleep(self, seconds: float) -> None:
        self._slept_s += seconds
