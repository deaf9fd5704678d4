"""Runs what hostile input could crash or exhaust in a helper process: pure functions, bounded, awaited.

    sandbox = Sandbox(preload=("tandem.grammar",))
    task = asyncio.create_task(sandbox.run())       its owner ends it, and the helper with it
    made = await sandbox.call(parse, text, caller=tenant)

A call sends a module's function and its arguments, pickled; what the function returns or raises comes back the same
way and is unpickled on the loop: return bytes where it is large. One helper serves several calls at once, each in a
fork of its own (tandem/containment/sandboxed.py), so a call that dies ends nobody else, and the next one finds a
process that has imported everything. Callers take turns; nobody's many calls come before another's first.

    outcome of a call                         is raised as
    it raised                                 that exception
    a signal ended it: SEGV, ABRT, BUS, …     CallDied
    it used up its CPU time or memory         CallExhausted
    no lane was free, or helpers went twice   SandboxBusy       says nothing of the call: it may be tried again

A helper that is lost takes no call with it: another is started, and runs what the lost one had not answered. Only a
call that was under way in two lost ones is refused.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import structlog

from tandem.containment.sandboxed import DIED, LEAVES, RAISED, REPLY, STAYS, Bounds, head_of
from tandem.process import dying_with_parent

T = TypeVar("T")
Lane: TypeAlias = tuple[asyncio.StreamReader, asyncio.StreamWriter]
LANES = 2
MAX_WAITING = 256  # of one caller
MAX_CALLERS = 256
WAIT_S = 10.0
# Others of its owner's start need the cores first; a call does not wait for that.
START_S = 2.0
RESTART_S = 0.5
PIECE = 2**18
BUFFER_BYTES = 2**20
# Beside a call's own bound, which its fork keeps: for the helper that does not.
GRACE_S = 10.0
# All that the helper needs of its owner's environment, where there may be secrets.
ENVIRONMENT = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "TMPDIR")

log = structlog.get_logger(__name__)


class CallFailed(Exception):
    """A call that has no outcome of its own."""


class CallDied(CallFailed):
    """`how` names the signal that ended it, or its exit status."""

    def __init__(self, how: str) -> None:
        super().__init__(f"the helper process died of it: {how}")
        self.how = how


class CallExhausted(CallFailed):
    """`what` it had no more of: "CPU time" or "memory"."""

    def __init__(self, what: str) -> None:
        super().__init__(f"it needs more {what} than it may use")
        self.what = what


class SandboxBusy(CallFailed):
    """Not run, or not to its end, for a reason that lies with the machine."""


@dataclass(slots=True)
class _Waiting:
    caller: str
    payload: bytes
    bounds: Bounds
    result: asyncio.Future[Any]
    giving_up: asyncio.TimerHandle
    lost_once: bool = False


class Sandbox:
    """One helper process. Calls that come before `run` wait for it.

    Args:
        preload: modules that the helper imports before its first call, and once.
        bounds: of calls that bring none.
        stays: a fork serves many calls, which is quick. Then one caller has one lane at a time, whatever it does to it.
        wait_s: a call waits for a lane no longer; None: WAIT_S.
    """

    def __init__(
        self, preload: Sequence[str] = (), bounds: Bounds | None = None, lanes: int = LANES, stays: bool = False,
        wait_s: float | None = None,
    ) -> None:  # fmt: skip
        self._preload, self._bounds, self._lanes = tuple(preload), bounds or Bounds(), lanes
        self._stays, self._served, self._wait_s = stays, set[str](), wait_s
        self._queues: OrderedDict[str, deque[_Waiting]] = OrderedDict()
        self._arrived = asyncio.Event()
        self._lost: list[_Waiting] = []
        self.pid: int | None = None

    async def call(self, function: Callable[..., T], *args: Any, caller: str = "", bounds: Bounds | None = None) -> T:
        """Run `function(*args)` there; returns or raises what it does.

        Raises:
            CallFailed
        """
        if not self._stays and self._is_full(caller):
            raise SandboxBusy("too many calls wait for the helper process")
        loop = asyncio.get_running_loop()
        payload, future = pickle.dumps((function, args), protocol=5), loop.create_future()
        giving_up = loop.call_later(self._wait_s or WAIT_S, _give_up, future)
        waiting = _Waiting(caller, payload, bounds or self._bounds, future, giving_up)
        self._queues.setdefault(caller, deque()).append(waiting)
        self._arrived.set()
        try:
            result: T = await future
            return result
        finally:
            waiting.giving_up.cancel()
            # The exception's traceback has this frame, and the future the exception: a cycle that holds the arguments.
            del future, waiting

    def _is_full(self, caller: str) -> bool:
        return len(self._queues.get(caller, ())) >= MAX_WAITING or len(self._queues) >= MAX_CALLERS

    async def run(self) -> None:
        """Serve for ever; a helper that is lost is replaced. Ends the helper when it is cancelled."""
        with suppress(TimeoutError):
            async with asyncio.timeout(START_S):
                await self._arrived.wait()
        while True:
            # A task of its own: the group cancels its task when a lane is lost, and may forget that others did, too.
            await asyncio.create_task(self._serve_helper())
            if (running := asyncio.current_task()) and running.cancelling():
                raise asyncio.CancelledError
            self._take_back()
            await asyncio.sleep(RESTART_S)

    async def _serve_helper(self) -> None:
        """Starts a helper; returns once it is lost."""
        try:
            async with self._helper() as (ended, lanes), asyncio.TaskGroup() as group:
                group.create_task(_notice_death(ended))
                for reader, writer in lanes:
                    group.create_task(self._serve(reader, writer))
        except* (OSError, EOFError, pickle.UnpicklingError) as errors:
            log.warning("the helper process was lost", why=repr(errors.exceptions[0]))

    @asynccontextmanager
    async def _helper(self) -> AsyncIterator[tuple[asyncio.Future[int], list[Lane]]]:
        """Its end, with its exit status, and its lanes."""
        async with AsyncExitStack() as stack:
            ends = [self._pair(stack) for _ in range(self._lanes)]
            theirs = [their.fileno() for _, their in ends]
            arguments = ",".join(map(str, theirs)), STAYS if self._stays else LEAVES, *self._preload
            process = _started(theirs, arguments)
            ended = _end_of(process)
            stack.push_async_callback(_end, process, ended)
            self.pid = process.pid
            for _, their in ends:
                their.close()
            lanes = list[Lane]()
            for own, _ in ends:
                lanes.append(await asyncio.open_connection(sock=own.dup(), limit=BUFFER_BYTES))
                stack.callback(lanes[-1][1].close)
            yield ended, lanes

    def _pair(self, stack: AsyncExitStack) -> tuple[socket.socket, socket.socket]:
        own, their = socket.socketpair()
        stack.callback(own.close)
        stack.callback(their.close)
        return own, their

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One lane, until the helper is lost."""
        while True:
            await self._serve_one(await self._next(), reader, writer)  # holds nothing of a call while it waits

    async def _serve_one(self, waiting: _Waiting, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._served.add(waiting.caller)
        try:
            async with asyncio.timeout(waiting.bounds.wall_s + GRACE_S):
                reply = await _exchange(reader, writer, waiting.payload, waiting.bounds)
        except BaseException:
            self._lost_with(waiting)
            raise
        finally:
            self._served.discard(waiting.caller)
        _settle(waiting.result, reply)

    def _lost_with(self, waiting: _Waiting) -> None:
        """The helper went while it had this call; the next one runs it."""
        if waiting.lost_once:
            _settle(waiting.result, SandboxBusy("the helper process was lost"))
        elif not waiting.result.done():
            waiting.lost_once = True
            waiting.giving_up = asyncio.get_running_loop().call_later(self._wait_s or WAIT_S, _give_up, waiting.result)
            self._lost.append(waiting)

    def _take_back(self) -> None:
        """Calls of a helper that is gone, before others of their callers: only now does no lane of it take them."""
        for waiting in self._lost:
            self._queues.setdefault(waiting.caller, deque()).appendleft(waiting)
            self._arrived.set()
        self._lost.clear()

    async def _next(self) -> _Waiting:
        """Returns the next caller's next call."""
        while True:
            while (caller := self._next_caller()) is None:
                self._arrived.clear()
                await self._arrived.wait()
            calls = self._queues.pop(caller)
            waiting = calls.popleft()
            if calls:
                self._queues[caller] = calls
            if not waiting.result.done():
                waiting.giving_up.cancel()
                return waiting

    def _next_caller(self) -> str | None:
        """Returns the one that has waited longest for its turn, and may have a lane."""
        if not self._stays:
            return next(iter(self._queues), None)
        return next((caller for caller in self._queues if caller not in self._served), None)


async def _exchange(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, payload: bytes, bounds: Bounds) -> Any:
    """Send a call; returns what it returned, or the exception that it is to raise."""
    writer.write(head_of(payload, bounds))
    for begin in range(0, len(payload), PIECE):  # the loop has other work than to copy a long call at once
        writer.write(payload[begin : begin + PIECE])
        await writer.drain()
    (size,) = REPLY.unpack(await reader.readexactly(REPLY.size))
    if size > bounds.memory_bytes:
        raise EOFError(f"a reply of {size} bytes, more than its call may use")
    kind, value = _unpickled(await _read(reader, size))
    if kind == DIED:
        return _death(value)
    if kind == RAISED:
        return CallExhausted("memory") if isinstance(value, MemoryError) else value
    return _Returned(value)


async def _read(reader: asyncio.StreamReader, size: int) -> bytearray:
    """A long reply is copied as it comes, not at once."""
    data = bytearray(size)
    for begin in range(0, size, PIECE):
        end = min(size, begin + PIECE)
        data[begin:end] = await reader.readexactly(end - begin)
    return data


def _unpickled(reply: bytearray) -> tuple[str, Any]:
    """Unpickle it; raises UnpicklingError where it is no reply, from a fork whose memory was overwritten."""
    try:
        kind, value = pickle.loads(reply)
    except Exception as error:
        raise pickle.UnpicklingError(repr(error)) from error
    return kind, value


@dataclass(frozen=True, slots=True)
class _Returned:
    value: Any


def _death(code: int) -> CallFailed:
    if code == -signal.SIGPROF:
        return CallExhausted("CPU time")
    if code == -signal.SIGALRM:
        return SandboxBusy("the machine was too busy to run it in time")
    return CallDied(_name(code))


def _started(passed: Sequence[int], arguments: Sequence[str]) -> subprocess.Popen[bytes]:
    """Starts it without a fork, whose handlers of gRPC may end the child by SIGSEGV while other threads call gRPC.

    Popen starts programs by vfork, which runs no handlers; uvloop forks.
    """
    return subprocess.Popen(
        dying_with_parent(sys.executable, "-m", "tandem.containment", *arguments),
        env=_environment(), pass_fds=passed, start_new_session=True, stdin=subprocess.DEVNULL,
    )  # fmt: skip


def _end_of(process: subprocess.Popen[bytes]) -> asyncio.Future[int]:
    """Its exit status, once it has one; a thread waits for it."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[int] = loop.create_future()

    def tell(code: int) -> None:
        if not ended.done():
            ended.set_result(code)

    def wait() -> None:
        code = process.wait()
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(tell, code)

    threading.Thread(target=wait, name="helper-end", daemon=True).start()
    return ended


async def _notice_death(ended: asyncio.Future[int]) -> None:
    """An idle helper's, too: the next call finds another.

    Raises:
        EOFError
    """
    raise EOFError(f"it ended: {_name(await asyncio.shield(ended))}")


def _name(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit status {code}"


async def _end(process: subprocess.Popen[bytes], ended: asyncio.Future[int]) -> None:
    process.kill()
    await ended


def _settle(result: asyncio.Future[Any], outcome: Any) -> None:
    if result.done():
        return
    if isinstance(outcome, _Returned):
        result.set_result(outcome.value)
    else:
        result.set_exception(outcome)


def _give_up(result: asyncio.Future[Any]) -> None:
    _settle(result, SandboxBusy("no lane of the helper process was free in time"))


def _environment() -> dict[str, str]:
    kept = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
    return {**kept, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
