"""The engine's own thread: nothing else touches the engine, and no gRPC call waits for a forward pass.

asyncio --call(fn)--> inbox --between steps--> fn(engine) --> future
engine.step() --> outputs --> on_outputs, on the asyncio loop
          └─> tokens and seconds of the step --> rates
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import TypeVar

import structlog

from tandem.engine import Engine, EngineStats, SequenceOutput
from tandem.worker.rates import Rates

T = TypeVar("T")
IDLE_WAIT_S = 0.2
STALLED_WAIT_S = 0.002

log = structlog.get_logger(__name__)


class EngineThread:
    """Runs an engine until `close`. `on_outputs` and `on_death` are called on the loop that `start` was called on."""

    def __init__(
        self,
        engine: Engine,
        on_outputs: Callable[[list[SequenceOutput]], None],
        on_death: Callable[[BaseException], None],
    ) -> None:
        self._engine = engine
        self._on_outputs = on_outputs
        self._on_death = on_death
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.stats: EngineStats = engine.stats()
        self.rates = Rates()

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def submit(self, fn: Callable[[Engine], T]) -> Future[T]:
        """Have `fn` run on the engine's thread before its next step; from any thread."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(fn(self._engine))
            except BaseException as error:
                future.set_exception(error)

        self._inbox.put(run)
        return future

    async def call(self, fn: Callable[[Engine], T]) -> T:
        """`submit`, awaited. The engine's exceptions are raised here."""
        return await asyncio.wrap_future(self.submit(fn))

    def close(self, timeout: float = 5.0) -> None:
        self._closing.set()
        self._inbox.put(lambda: None)
        self._thread.join(timeout)

    def _run(self) -> None:
        try:
            stalled = False
            while not self._closing.is_set():
                self._serve_inbox(stalled)
                before, started = self.stats, time.monotonic()
                outputs = self._step()
                self.stats = self._engine.stats()
                stalled = not outputs and self.stats == before
                self._measure(before, time.monotonic() - started)
        except BaseException as error:
            self._loop.call_soon_threadsafe(self._on_death, error)
            log.error("engine died", exc_info=error)

    def _serve_inbox(self, stalled: bool) -> None:
        """Everything in the inbox; waits for the first where the engine has nothing it could do."""
        try:
            if not self._engine.has_work():
                self._inbox.get(timeout=IDLE_WAIT_S)()
            elif stalled:
                self._inbox.get(timeout=STALLED_WAIT_S)()
            while True:
                self._inbox.get_nowait()()
        except Empty:
            return

    def _step(self) -> list[SequenceOutput]:
        outputs = self._engine.step() if self._engine.has_work() else []
        if outputs:
            self._loop.call_soon_threadsafe(self._on_outputs, outputs)
        return outputs

    def _measure(self, before: EngineStats, seconds: float) -> None:
        read = self.stats.num_read_tokens - before.num_read_tokens
        written = self.stats.num_written_tokens - before.num_written_tokens
        if read or written:
            self.rates.step(read, written, seconds)
