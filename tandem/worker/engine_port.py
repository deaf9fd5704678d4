"""What coroutine code knows of an engine: it submits functions, and is called with outputs and with the engine's death.

submit(fn) --between two steps--> fn(engine) --> future
beside_step(fn) --at once, also while a step computes--> its outcome
call(fn), call(fn), … ── what a turn of the loop brings ──> one submit ──> their results, in one callback
engine.step() --> outputs --> on_outputs, on the event loop
          └─> tokens and seconds of the step --> rates
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

from tandem.adapters import AdapterRef
from tandem.engine import AdapterStore, AdapterStoreFull, Engine, Request, SequenceOutput
from tandem.work_threads import WorkThreads
from tandem.worker.errors import SequenceFailed
from tandem.worker.rates import Rates

T = TypeVar("T")
OnOutputs = Callable[[list[SequenceOutput]], None]
OnDeath = Callable[[BaseException], None]
# What a function returned, or raised.
Outcome: TypeAlias = tuple[Any, BaseException | None]


class EngineDied(RuntimeError):
    """The engine has ended: no function will run on it any more."""


class EngineStuck(RuntimeError):
    """The engine does not come to the end of a step."""


class EnginePort(ABC):
    """An engine and what steps it. Only what never changes is read from `engine` directly: its layout, its cache."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.stats = self._measured = engine.stats()
        self.rates = Rates()
        self._calls: list[Call] = []
        self._reading = WorkThreads("adapters", 1)  # they are read one after the other

    @abstractmethod
    def start(self, on_outputs: OnOutputs, on_death: OnDeath) -> None:
        """Step from now on. Both are called on the loop that this is called on."""

    @abstractmethod
    def submit(self, fn: Callable[[Engine], T]) -> Future[T]:
        """Have `fn` run before the engine's next step; from any thread. EngineDied if that does not come."""

    @abstractmethod
    def beside_step(self, fn: Callable[[Engine], T]) -> T | None:
        """What `fn` returns, run on the caller's thread at once, also while a step computes; None where that is not to
        be had. `fn` may change nothing that a step uses: of all that changes an engine, only `reserve` without
        `outranks` is such."""

    @property
    @abstractmethod
    def busy_s(self) -> float:
        """How long the step or function that runs now has taken; 0 if none does."""

    @abstractmethod
    def close(self) -> None:
        """No more steps."""

    async def prepare(self, request: Request, timeout_s: float) -> None:
        """Compile the request's grammar and read its adapter, where they are not known yet, beside the engine's steps.

        Raises:
            SequenceFailed
        """
        try:
            async with asyncio.timeout(timeout_s):
                if request.sampling.grammar:
                    await asyncio.to_thread(self._compile, request)
                if request.lora is not None:
                    adapters = self._adapters()
                    cached = adapters.cached(request.lora.revision)
                    request.adapter = cached or await self._reading.run(adapters.get, request.lora)
        except ValueError as error:
            raise SequenceFailed("INVALID_ARGUMENT", str(error)) from None
        except AdapterStoreFull as error:
            raise SequenceFailed("RESOURCE_EXHAUSTED", str(error)) from None
        except TimeoutError:
            what = "its grammar was compiled or its adapter read"
            raise SequenceFailed("DEADLINE_EXCEEDED", f"the deadline passed while {what}") from None

    def _compile(self, request: Request) -> None:
        with self.engine.crash_page.compiling(request.choice_id or request.request_id):
            self.engine.grammars.compile(request.sampling.grammar)

    async def read_adapter(self, name: str, path: str) -> AdapterRef:
        """
        Raises:
            SequenceFailed
        """
        try:
            return await self._reading.run(self._adapters().read, name, path)
        except ValueError as error:
            raise SequenceFailed("INVALID_ARGUMENT", str(error)) from None
        except AdapterStoreFull as error:
            raise SequenceFailed("RESOURCE_EXHAUSTED", str(error)) from None

    def drop_adapter(self, revision: str) -> None:
        if self.engine.adapters is not None:
            self.engine.adapters.drop(revision)

    def _adapters(self) -> AdapterStore:
        if self.engine.adapters is None:
            raise ValueError("lora_dir: the workers take no adapters: start them with --lora-dir")
        return self.engine.adapters

    async def call(self, fn: Callable[[Engine], T]) -> T:
        """`submit`, awaited. What `fn` raises is raised here. Not run if the caller is cancelled before its turn."""
        loop = asyncio.get_running_loop()
        call = Call(fn, loop.create_future())
        if not self._calls:
            loop.call_soon(self._submit_calls, loop)
        self._calls.append(call)
        result: T = await call.result
        return result

    def _submit_calls(self, loop: asyncio.AbstractEventLoop) -> None:
        calls, self._calls = self._calls, []

        def ran(done: Future[list[Outcome]]) -> None:
            error = done.exception()
            outcomes: list[Outcome] = [(None, error)] * len(calls) if error else done.result()
            if not loop.is_closed():
                loop.call_soon_threadsafe(_settle, calls, outcomes)

        self.submit(lambda engine: [call.run(engine) for call in calls]).add_done_callback(ran)

    def _beside(self, fn: Callable[[Engine], T]) -> T:
        result = fn(self.engine)
        self.stats = self.engine.stats()
        return result

    def _measure(self, seconds: float) -> bool:
        """Note what a step of so many seconds did; False if it brought nothing on."""
        before, self.stats = self._measured, self.engine.stats()
        self._measured = self.stats
        read = self.stats.num_read_tokens - before.num_read_tokens
        written = self.stats.num_written_tokens - before.num_written_tokens
        if read or written:
            self.rates.step(read, written, seconds)
        return self.stats != before


class Call(NamedTuple):
    """Of a function on the engine, by a coroutine."""

    fn: Callable[[Engine], Any]
    result: asyncio.Future[Any]

    def run(self, engine: Engine) -> Outcome:
        if self.result.cancelled():
            return None, None
        try:
            return self.fn(engine), None
        except Exception as error:
            return None, error


def _settle(calls: list[Call], outcomes: list[Outcome]) -> None:
    for call, (value, error) in zip(calls, outcomes, strict=True):
        if call.result.done():
            continue
        if error is not None:
            call.result.set_exception(error)
        else:
            call.result.set_result(value)


class Submission(Generic[T]):
    """A function on its way to the engine."""

    def __init__(self, fn: Callable[[Engine], T]) -> None:
        self.future: Future[T] = Future()
        self._fn = fn

    def run(self, engine: Engine) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            self.future.set_result(self._fn(engine))
        except BaseException as error:
            self.future.set_exception(error)

    def refuse(self) -> None:
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(EngineDied("the engine has ended"))
