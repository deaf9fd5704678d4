"""Processes that share one thread and one made-up time.

    World      the time, the seeded order in which things happen, and what happened
    Process    an event loop of its own: its tasks, its timers, a clock that began at another moment than the others'

A turn runs what one process has ready; which process is drawn from the seed. When no process has anything ready, time
jumps to the next timer. Nothing here waits, so a run is a function of its seed.

    kill      the process never runs again, not even what stands behind `finally`
    pause     it runs nothing until `resume`; what is sent to it meanwhile waits for it
    starve    others want its core, too: whenever it has something to do, it waits for them first
"""

from __future__ import annotations

import asyncio
import heapq
import os
import sys
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, MutableMapping
from contextvars import Context
from itertools import count
from random import Random
from types import TracebackType
from typing import Any, NoReturn, TypeVar
from weakref import WeakSet

import structlog
from opentelemetry import propagate
from opentelemetry.baggage.propagation import W3CBaggagePropagator

from tandem.process.log_output import LogOutput

T = TypeVar("T")
# So many turns without time moving on: something runs in circles.
MAX_TURNS_AT_ONCE = 200_000
# What a timer that is not due yet is ahead of now at least, whatever floats make of it.
LEAST_WAIT_S = 1e-9
# How long a process runs on at once, and in turns, where others want its core.
SLICE_S, SLICE_TURNS = 0.004, 20
# Tasks that go on after being cancelled so often do so on purpose.
MAX_CANCELS = 20


class Stuck(AssertionError):
    """Nothing can happen any more, or nothing but the same over and over, or not within the time given."""


class Occurrence:
    """Something that the world itself does, at its time, unless it is cancelled."""

    def __init__(self, callback: Callable[..., object], args: tuple[Any, ...]) -> None:
        self._callback: Callable[..., object] | None = callback
        self._args = args

    def cancel(self) -> None:
        self._callback = None

    def cancelled(self) -> bool:
        return self._callback is None

    def happen(self) -> None:
        if self._callback is not None:
            self._callback(*self._args)


class World:
    """Use as a context manager: at its end every task of every process is cancelled and run to its end."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.now = 0.0
        self.processes: list[Process] = []
        # When, what, and more: every message sent, every line logged.
        self.events: list[tuple[Any, ...]] = []
        # Exceptions that nobody handled, with the process they happened in.
        self.errors: list[str] = []
        self.closing = False
        self._log_descriptor = os.open(os.devnull, os.O_WRONLY)
        self._logs = LogOutput(self._log_descriptor)
        self._timers: list[tuple[float, int, asyncio.TimerHandle | Occurrence]] = []
        self._numbers = count()
        self._runnable: list[Process] = []
        self._turns_at_once = 0

    def __enter__(self) -> World:
        self._logging = structlog.get_config()
        structlog.configure(processors=[self._log_line], cache_logger_on_first_use=False)
        self._textmap = propagate.get_global_textmap()
        propagate.set_global_textmap(W3CBaggagePropagator())  # trace ids are random, where traces are recorded
        self._hooks = sys.get_asyncgen_hooks()
        sys.set_asyncgen_hooks(finalizer=_close_generator)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.closing = True
        for process in self.processes:
            process.end()
        sys.set_asyncgen_hooks(*self._hooks)
        structlog.configure(**self._logging)
        propagate.set_global_textmap(self._textmap)
        os.close(self._log_descriptor)

    def fill_log_disk(self, full: bool) -> None:
        """From now on no process can write its logs, or all can again."""
        disk = os.open("/dev/full" if full else os.devnull, os.O_WRONLY)
        os.dup2(disk, self._log_descriptor)
        os.close(disk)

    def process(self, name: str) -> Process:
        """A new process. Its clock shows another time than everybody else's."""
        process = Process(self, name, clock_offset=1000.0 * (1 + len(self.processes)))
        self.processes.append(process)
        return process

    def log(self, *event: Any) -> None:
        if not self.closing:
            self.events.append((round(self.now, 7), *event))

    def after(self, seconds: float, callback: Callable[..., object], *args: Any) -> Occurrence:
        """Something that happens outside of all processes, such as a message's arrival."""
        return self.at(self.now + seconds, callback, *args)

    def at(self, moment: float, callback: Callable[..., object], *args: Any) -> Occurrence:
        """As `after`. Of equal moments the one that was named first comes first."""
        occurrence = Occurrence(callback, args)
        self.add_timer(moment, occurrence)
        return occurrence

    def add_timer(self, when: float, handle: asyncio.TimerHandle | Occurrence) -> None:
        heapq.heappush(self._timers, (when, next(self._numbers), handle))

    def add_runnable(self, process: Process) -> None:
        self._runnable.append(process)

    def run(self, process: Process, work: Coroutine[Any, Any, T], limit_s: float = 600.0) -> T:
        """The result of `work`, run as a task of `process`; `limit_s` is of simulated time.

        Raises:
            Stuck
        """
        task = process.create_task(work)
        end = self.now + limit_s
        while not task.done():
            self.step()
            if self.now > end:
                raise Stuck(f"not done after {limit_s} simulated seconds")
        return task.result()

    def step(self) -> None:
        """One turn of one process, or the next moment at which anything happens."""
        if not self._runnable:
            self._advance()
            return
        self._turns_at_once += 1
        if self._turns_at_once > MAX_TURNS_AT_ONCE:
            raise Stuck(f"{MAX_TURNS_AT_ONCE} turns and still {self.now:.6f}")
        runnable = self._runnable
        at = int(self.random.random() * len(runnable)) if len(runnable) > 1 else 0
        runnable[at], runnable[-1] = runnable[-1], runnable[at]
        runnable.pop().turn()

    def _log_line(self, logger: object, level: str, line: MutableMapping[str, Any]) -> NoReturn:
        """Adds what the code under test logs to the events, and writes it as a service does."""
        self._logs.write(f"{line}\n")
        process = asyncio._get_running_loop()
        self.log("log", process.name if isinstance(process, Process) else "", level, dict(line))
        raise structlog.DropEvent

    def _advance(self) -> None:
        timers = self._timers
        while timers and timers[0][2].cancelled():
            heapq.heappop(timers)
        if not timers:
            raise Stuck("every process waits, and no timer is set")
        if timers[0][0] > self.now:
            self.now = timers[0][0]
            self._turns_at_once = 0
        while timers and timers[0][0] <= self.now:
            handle = heapq.heappop(timers)[2]
            if handle.cancelled():
                continue
            if isinstance(handle, Occurrence):
                handle.happen()
            else:
                handle._loop.timer_due(handle)  # type: ignore[attr-defined]


class Process(asyncio.AbstractEventLoop):
    """The event loop of one process."""

    def __init__(self, world: World, name: str, clock_offset: float) -> None:
        self.world = world
        self.name = name
        self.alive = True
        self.paused = False
        self.pauses = 0
        self.share = 1.0
        self.disk_late_s = 0.0  # so long its disk takes for whatever it does
        self._turns_left = 0  # of its slice
        # Called with the process when it dies, pauses or resumes.
        self.watchers: list[Callable[[Process], None]] = []
        self._clock_offset = clock_offset
        self._context = Context()
        self._ready: deque[asyncio.Handle] = deque()
        self._listed = False
        self._tasks: WeakSet[asyncio.Task[Any]] = WeakSet()
        self._remains: set[asyncio.Task[Any]] = set()

    def __repr__(self) -> str:
        return f"<{self.name}>"

    # --- what is done to it ---

    def kill(self) -> None:
        """As SIGKILL: from now on nothing of it runs."""
        if not self.alive:
            return
        self.alive = False
        self._remains = self.tasks()
        self._tell()

    def pause(self) -> None:
        """As SIGSTOP."""
        self.paused = True
        self.pauses += 1
        self._tell()

    def resume(self) -> None:
        """As SIGCONT."""
        self.paused = False
        self._list()
        self._tell()

    def starve(self, share: float) -> None:
        """From now on it has this part of a core."""
        self.share = share

    def pressure(self, seconds: float) -> float:
        """As the system tells it: tandem/liveness/starvation.py."""
        return 1 / self.share - 1

    def tasks(self) -> set[asyncio.Task[Any]]:
        """Those that have not ended."""
        return {task for task in self._tasks if not task.done()}

    def deliver(self, callback: Callable[..., object], *args: Any) -> None:
        """Run this in the process, from outside of it. A dead process gets nothing."""
        if self.alive:
            self.call_soon(callback, *args, context=self._context.copy())

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a task from outside of the process."""
        return self.create_task(work, context=self._context.copy())

    def end(self) -> None:
        """Cancel every task and let it end, the dead process's too: a test leaves nothing behind."""
        self.paused, self.share = False, 1.0
        tasks = sorted(self._remains | self.tasks(), key=_age)
        self.alive, self._remains = True, set()
        for _ in range(MAX_CANCELS):
            tasks = [task for task in tasks if not task.done()]
            for task in tasks:
                task.cancel()
            while self._ready:
                self.turn()
            tasks += [task for task in self.tasks() if task not in tasks]
            if not tasks:
                break
        self.alive = False

    def turn(self) -> None:
        """Run what is ready now."""
        self._listed = False
        if self.paused or not self.alive:
            return
        asyncio._set_running_loop(self)
        ready = self._ready
        try:
            for _ in range(len(ready)):
                if not self.alive:
                    break  # it was killed just now
                handle = ready.popleft()
                if not handle._cancelled:
                    handle._run()
        finally:
            asyncio._set_running_loop(None)
        self._turns_left -= 1
        if ready:
            self._list()
        else:
            self._turns_left = 0

    def timer_due(self, handle: asyncio.TimerHandle) -> None:
        if self.alive:
            self._ready.append(handle)
            self._list()

    def _list(self) -> None:
        if self._ready and not self._listed and not self.paused and self.alive:
            self._listed = True
            if self.share == 1 or self._turns_left > 0:
                self.world.add_runnable(self)
            else:
                wait_s = self.world.random.uniform(0, 2 * SLICE_S * self.pressure(0))
                self.world.after(wait_s, self._has_a_core)

    def _has_a_core(self) -> None:
        self._turns_left = SLICE_TURNS
        self.world.add_runnable(self)

    def _tell(self) -> None:
        for watcher in list(self.watchers):
            watcher(self)

    # --- what asyncio asks of an event loop ---

    def time(self) -> float:
        return self.world.now + self._clock_offset

    def call_soon(self, callback: Callable[..., object], *args: Any, context: Context | None = None) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        if not self._listed:
            self._list()
        return handle

    call_soon_threadsafe = call_soon

    def call_later(
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        wait = when - self.time()
        self.world.add_timer(self.world.now + (max(wait, LEAST_WAIT_S) if wait > 0 else 0.0), handle)
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        pass  # it is skipped when its time comes

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coro: Any, *, name: object = None, context: Context | None = None) -> asyncio.Task[Any]:
        task = asyncio.Task(coro, loop=self, name=name and str(name), context=context)
        self._tasks.add(task)
        return task

    def run_in_executor(  # type: ignore[override]
        self, executor: object, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        """Here, at once or when a slow disk comes to it: a thread would run at a moment that no seed knows."""
        future: asyncio.Future[T] = self.create_future()

        def run() -> None:
            if not future.cancelled():
                try:
                    future.set_result(func(*args))
                except Exception as error:
                    future.set_exception(error)

        if self.disk_late_s and getattr(executor, "_thread_name_prefix", "") == "kv-disk":
            self.call_later(self.disk_late_s, run)
        else:
            run()
        return future

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return asyncio._get_running_loop() is self

    def is_closed(self) -> bool:
        return not self.alive

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if not self.world.closing:
            self.world.errors.append(f"{self.name}: {context.get('message')}: {context.get('exception')!r}")

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        self.call_exception_handler(context)


def _close_generator(generator: AsyncGenerator[Any, Any]) -> None:
    """Closes a generator of the process that runs now."""
    process = asyncio._get_running_loop()
    if isinstance(process, Process) and process.alive:
        process.create_task(generator.aclose())


def _age(task: asyncio.Task[Any]) -> tuple[int, str]:
    """Orders tasks as they were made: their names count up."""
    return len(task.get_name()), task.get_name()
