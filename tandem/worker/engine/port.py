"""The engine's interface for coroutines: they submit functions, and get events, each sequence's in order.

submit(fn) --between two steps--> fn(engine) --> events ─┐
engine.step() ──────────────────> SequenceOutputs ───────┴──> on_events, on the event loop
          └─> tokens and seconds of the step --> rates
beside_step(fn) --immediately, also while a step computes--> its result
call(fn) --between two steps--> its result, awaited: for functions of no sequence

All of a sequence's events pass through this one queue, so no token overtakes the event that its sequence was added.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from tandem.adapters import AdapterRef
from tandem.block_hash import root_hash
from tandem.engine import AdapterStore, AdapterStoreFull, Engine, KVLayout, Request, SequenceOutput
from tandem.process import WorkThreads
from tandem.worker.engine.fault_stack import own_fault_stack
from tandem.worker.engine.rates import Rates
from tandem.worker.engine.step_counts import StepCounts
from tandem.worker.errors import SequenceFailed

T = TypeVar("T")
GRAMMARS_AT_ONCE = 2


class EngineDied(RuntimeError):
    """The engine has ended and runs no more functions."""


class EngineStuck(RuntimeError):
    """The engine does not finish a step."""


@dataclass(frozen=True, slots=True)
class Added:
    """A sequence is in the engine. `block_ids`: of a reservation, the blocks for its prompt, in order, and
    their `places` in layers with a window."""

    request_id: str
    num_cached_tokens: int = 0
    block_ids: Sequence[int] | None = None
    places: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Ended:
    """A sequence was aborted; or a function submitted for it raised `error` and left the sequence unchanged."""

    request_id: str
    error: Exception | None = None


# A `finished` SequenceOutput also ends its sequence.
Event: TypeAlias = Added | SequenceOutput | Ended
OnEvents = Callable[[Sequence[Event]], None]
OnDeath = Callable[[BaseException], None]


@dataclass(frozen=True, slots=True)
class Command:
    """A function on its way to the engine. Either `run` or `refuse` is called, and returns the resulting events."""

    run: Callable[[Engine], Sequence[Event]]
    refuse: Callable[[], Sequence[Event]]


class EnginePort(ABC):
    """An engine and the code that steps it. Only its constants (layout, cache) may be read from `engine` directly."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.stats = self._measured = engine.stats()
        self.rates = Rates()
        self.steps = StepCounts(self.now)
        self.landing: set[str] = set()  # the transfers whose blocks have come and are not cached yet
        self._of_this_turn: list[Command] = []
        self._reading = WorkThreads("adapters", 1)  # adapters are read one after the other
        self._compiling = WorkThreads("grammars", GRAMMARS_AT_ONCE)

    @abstractmethod
    def start(self, on_events: OnEvents, on_death: OnDeath) -> None:
        """Starts stepping. `on_events` and `on_death` are called on the caller's event loop."""

    @abstractmethod
    def beside_step(self, fn: Callable[[Engine], T]) -> T | None:
        """Runs `fn` on the caller's thread immediately, even while a step computes, and returns its result; None if
        that is not possible. `fn` must not change anything that a step uses: of all methods that change an engine, only
        `reserve` without `outranks`, and `expect`, `land`, `lend` and `lend_each` of `moving`, are allowed.
        """

    @abstractmethod
    def now(self) -> float:
        """Returns the time in seconds, by the clock that steps are measured with; from any thread."""

    @property
    @abstractmethod
    def busy_s(self) -> float:
        """Seconds that the running step or function has taken so far; 0 if none runs."""

    @property
    @abstractmethod
    def ended(self) -> bool:
        """True if no more steps will run. Without memory an engine may end without calling `on_death`."""

    @abstractmethod
    def close(self) -> None:
        """Ends stepping."""

    @abstractmethod
    def _put(self, commands: list[Command]) -> None:
        """Queues commands to run before the next step, or refuses them if the engine has ended; from any thread."""

    def submit(self, request_id: str, fn: Callable[[Engine], Sequence[Event]]) -> None:
        """Queues `fn` to run before the engine's next step; from any thread. `on_events` gets its events, or an Ended
        event with the error that `fn` raised, or with EngineDied.
        """
        self._put([_command(request_id, fn)])

    def submit_with_turn(self, request_id: str, fn: Callable[[Engine], Sequence[Event]]) -> None:
        """Submits `fn` from the event loop.

        All functions submitted in one loop iteration run between the same two steps: otherwise a burst of requests
        would wait for one step each.
        """
        if not self._of_this_turn:
            asyncio.get_running_loop().call_soon(self._put_turn)
        self._of_this_turn.append(_command(request_id, fn))

    async def call(self, fn: Callable[[Engine], T]) -> T:
        """Runs `fn` before the engine's next step; returns or raises what `fn` does. `fn` does not run if the caller is
        cancelled before its turn. Raises EngineDied.
        """
        answer: Future[T] = Future()

        def run(engine: Engine) -> Sequence[Event]:
            if answer.set_running_or_notify_cancel():
                try:
                    answer.set_result(fn(engine))
                except Exception as error:
                    answer.set_exception(error)
            return ()

        def refuse() -> Sequence[Event]:
            if answer.set_running_or_notify_cancel():
                answer.set_exception(EngineDied("the engine has ended"))
            return ()

        self._put([Command(run, refuse)])
        return await asyncio.wrap_future(answer)

    async def prepare(self, request: Request, timeout_s: float) -> None:
        """Compiles the request's grammar and reads its adapter beside the engine's steps, unless they are cached; notes
        whose its blocks will be.

        Raises SequenceFailed.
        """
        self.engine.moving.owners.enter(root_of(self.engine.layout, request), request.tenant)
        try:
            async with asyncio.timeout(timeout_s):
                if request.sampling.grammar:
                    await self._compiling.run(self._compile, request)
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
        with own_fault_stack(), self.engine.crash_page.compiling(request.choice_id or request.request_id):
            self.engine.grammars.compile(request.sampling.grammar)

    async def read_adapter(self, name: str, path: str) -> AdapterRef:
        """Reads a LoRA adapter into memory. Raises SequenceFailed."""
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
            raise ValueError("lora_dir: the workers take no adapters: start them with --lora-dir or --lora-hub")
        return self.engine.adapters

    def _put_turn(self) -> None:
        commands, self._of_this_turn = self._of_this_turn, []
        self._put(commands)

    def _beside(self, fn: Callable[[Engine], T]) -> T:
        result = fn(self.engine)
        self.stats = self.engine.stats()
        return result

    def _measure(self, seconds: float) -> bool:
        """Records what a step of so many seconds computed. Returns False if the step changed nothing."""
        before, self.stats = self._measured, self.engine.stats()
        self._measured = self.stats
        prefilled = self.stats.num_prefilled_tokens - before.num_prefilled_tokens
        written = self.stats.num_written_tokens - before.num_written_tokens
        if prefilled or written:
            self.rates.step(prefilled, written, seconds)
            self.steps.add(prefilled + written, before.num_running, seconds)
        return self.stats != before


def root_of(layout: KVLayout, request: Request) -> bytes:
    """Returns what the names of the request's blocks begin with."""
    adapter = request.lora.revision if request.lora else ""
    return root_hash(layout.model, layout.revision, adapter, request.cache_salt)


def _command(request_id: str, fn: Callable[[Engine], Sequence[Event]]) -> Command:
    def run(engine: Engine) -> Sequence[Event]:
        try:
            return fn(engine)
        except Exception as error:
            return [Ended(request_id, error)]

    return Command(run, lambda: [Ended(request_id, EngineDied("the engine has ended"))])
