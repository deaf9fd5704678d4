"""The engine's own thread: no other code touches the engine, and no gRPC call waits for a forward pass.

While a step computes, which is most of the time, the thread releases the engine's lock: others may then change what a
step does not use.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from typing import TypeVar

import structlog

from tandem.engine import Engine
from tandem.worker.engine.fault_stack import own_fault_stack
from tandem.worker.engine.port import Command, EnginePort, Event, OnDeath, OnEvents

T = TypeVar("T")
IDLE_WAIT_S = 0.2
STALLED_WAIT_S = 0.002
JOIN_S = 5.0
# The longest that the event loop waits for the engine's lock, which is held while a step is scheduled: that takes less.
BESIDE_WAIT_S = 0.002

log = structlog.get_logger(__name__)


class EngineThread(EnginePort):
    """Steps an engine on a thread of its own until `close`."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._inbox: SimpleQueue[list[Command] | None] = SimpleQueue()
        self._busy_since: float | None = None
        self._held = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self, on_events: OnEvents, on_death: OnDeath) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_events, self._on_death = on_events, on_death
        self._reading.start()
        self._compiling.start()
        self._thread.start()

    def beside_step(self, fn: Callable[[Engine], T]) -> T | None:
        if self._ended.is_set() or not self._held.acquire(timeout=BESIDE_WAIT_S):
            return None
        try:
            return self._beside(fn)
        finally:
            self._held.release()

    def now(self) -> float:
        return time.monotonic()

    @property
    def busy_s(self) -> float:
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    @property
    def ended(self) -> bool:
        return self._ended.is_set()

    def close(self) -> None:
        self._ended.set()
        self._inbox.put(None)
        self._reading.close()
        self._compiling.close()
        if self._thread.ident is not None:
            self._thread.join(JOIN_S)
        self.engine.ranks.close()

    def _put(self, commands: list[Command]) -> None:
        self._inbox.put(commands)
        if self._ended.is_set():
            self._refuse_inbox()

    def _run(self) -> None:
        try:
            with own_fault_stack():
                self._run_steps()
        except BaseException as error:
            closed = self._ended.is_set()
            self._ended.set()  # set before `on_death` is called
            if not closed:
                self._loop.call_soon_threadsafe(self._on_death, error)
            log.error("engine died", exc_info=error)
        finally:
            self._ended.set()
            self._refuse_inbox()

    def _run_steps(self) -> None:
        stalled = False
        while not self._ended.is_set():
            self._serve_inbox(stalled)
            stalled = not self._step()

    def _serve_inbox(self, stalled: bool) -> None:
        """Runs all commands of the inbox; waits for the first command if the engine cannot do any work."""
        events: list[Event] = []
        with suppress(Empty):
            if not self.engine.has_work():
                events += self._serve(self._inbox.get(timeout=IDLE_WAIT_S))
            elif stalled:
                events += self._serve(self._inbox.get(timeout=STALLED_WAIT_S))
            while True:
                events += self._serve(self._inbox.get_nowait())
        self._tell(events)

    def _serve(self, commands: list[Command] | None) -> Iterator[Event]:
        for command in commands or ():
            self._busy_since = time.monotonic()
            with self._held:
                events = command.run(self.engine)
            self._busy_since = None
            yield from events

    def _deliver(self, events: Sequence[Event]) -> None:
        """Delivers events, on the loop.

        Out of memory it ends the worker, as requests would wait for the lost events.
        """
        try:
            self._on_events(events)
        except MemoryError as error:
            self._on_death(error)

    def _refuse_inbox(self) -> None:
        events: list[Event] = []
        with suppress(Empty):
            while True:
                for command in self._inbox.get_nowait() or ():
                    events += command.refuse()
        self._tell(events)

    def _tell(self, events: Sequence[Event]) -> None:
        if events:
            with suppress(RuntimeError):  # the loop is closed: no receiver is left
                self._loop.call_soon_threadsafe(self._deliver, events)

    def _step(self) -> bool:
        """Computes one step. Returns True if there was work."""
        started = self._busy_since = time.monotonic()
        with self._held:
            outputs = self.engine.step(self._released()) if self.engine.has_work() else []
        self._busy_since = None
        if not self._ended.is_set():
            self._tell(outputs)
        with self._held:
            return self._measure(time.monotonic() - started) or bool(outputs)

    @contextmanager
    def _released(self) -> Iterator[None]:
        self._held.release()
        try:
            yield
        finally:
            self._held.acquire()
