"""Runs functions that hostile input could crash or exhaust in a helper process: pure, bounded and awaited.

    sandbox = Sandbox(preload=("tandem.grammar",))
    task = asyncio.create_task(sandbox.run())       its owner ends it, and the helper with it
    made = await sandbox.call(parse, text, caller=tenant)

A call sends a module's function and its arguments, pickled. The result or exception comes back pickled, too, and is
unpickled on the loop: return bytes if it is large. One helper serves several calls concurrently, each in a fork of its
own (tandem/containment/sandboxed.py), so a call that dies ends no other, and the next call finds a process that has
imported everything. Callers take turns, so that one caller's many calls do not delay another's first.

    outcome of a call                         raised as
    it raised                                 that exception
    a signal ended it: SEGV, ABRT, BUS, …     CallDied
    it used up its CPU time or memory         CallExhausted
    no lane was free, or two helpers lost     SandboxBusy       not the call's fault: it may be tried again

If a helper is lost, another is started, and runs the calls that the lost helper had not answered. Only a call that was
under way in two lost helpers is refused.
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
MAX_WAITING = 256  # most waiting calls of one caller
MAX_CALLERS = 256
WAIT_S = 10.0
# Seconds by which the helper starts later than its owner, which needs the cores; the first call ends the delay.
START_S = 2.0
RESTART_S = 0.5
PIECE = 2**18
BUFFER_BYTES = 2**20
# Time beyond a call's own bound, which its fork enforces; after it the helper counts as lost.
GRACE_S = 10.0
# The only variables that the helper gets of its owner's environment, which may contain secrets.
ENVIRONMENT = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "TMPDIR")

log = structlog.get_logger(__name__)


class CallFailed(Exception):
    """A call without a result or exception of its own."""


class CallDied(CallFailed):
    """The call's fork died. `how`: the signal that ended it, or its exit status."""

    def __init__(self, how: str) -> None:
        super().__init__(f"the helper process died of it: {how}")
        self.how = how


class CallExhausted(CallFailed):
    """The call used up `what`: "CPU time" or "memory"."""

    def __init__(self, what: str) -> None:
        super().__init__(f"it needs more {what} than it may use")
        self.what = what


class SandboxBusy(CallFailed):
    """The call did not run to its end, though nothing was wrong with the call itself."""


@dataclass(slots=True)
class _Waiting:
    caller: str
    payload: bytes
    bounds: Bounds
    result: asyncio.Future[Any]
    giving_up: asyncio.TimerHandle
    lost_once: bool = False


class Sandbox:
    """A helper process. Calls that are made before `run` wait for it.

    Args:
        preload: modules that the helper imports once, before its first call.
        bounds: the bounds of calls that have none of their own.
        stays: a fork serves many calls, which is fast. Then a caller, who might harm a lane, has one lane at a time.
        wait_s: the longest that a call waits for a lane; None: WAIT_S.
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
        """Runs `function(*args)` in the helper; returns or raises what it does.

        Raises:
            CallFailed: the call has no outcome of its own.
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
            # Breaks a cycle that would hold the arguments: the exception's traceback has this frame, the future the
            # exception.
            del future, waiting

    def _is_full(self, caller: str) -> bool:
        return len(self._queues.get(caller, ())) >= MAX_WAITING or len(self._queues) >= MAX_CALLERS

    async def run(self) -> None:
        """Serves calls until cancelled, and replaces a helper that is lost. Ends the helper when cancelled."""
        with suppress(TimeoutError):
            async with asyncio.timeout(START_S):
                await self._arrived.wait()
        while True:
            # A task of its own, as the task group cancels its task when a lane is lost, and may lose a cancellation
            # from outside.
            await asyncio.create_task(self._serve_helper())
            if (running := asyncio.current_task()) and running.cancelling():
                raise asyncio.CancelledError
            self._take_back()
            await asyncio.sleep(RESTART_S)

    async def _serve_helper(self) -> None:
        """Starts a helper and serves calls; returns once the helper is lost."""
        try:
            async with self._helper() as (ended, lanes), asyncio.TaskGroup() as group:
                group.create_task(_notice_death(ended))
                for reader, writer in lanes:
                    group.create_task(self._serve(reader, writer))
        except* (OSError, EOFError, pickle.UnpicklingError) as errors:
            log.warning("the helper process was lost", why=repr(errors.exceptions[0]))

    @asynccontextmanager
    async def _helper(self) -> AsyncIterator[tuple[asyncio.Future[int], list[Lane]]]:
        """Starts a helper. Yields the future of its exit status, and its lanes."""
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
        """Serves calls on one lane, until the helper is lost."""
        while True:
            # A separate frame, so that no call's data is held while waiting.
            await self._serve_one(await self._next(), reader, writer)

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
        """Keeps a call whose helper was lost, for the next helper; refuses it if that was the second."""
        if waiting.lost_once:
            _settle(waiting.result, SandboxBusy("the helper process was lost"))
        elif not waiting.result.done():
            waiting.lost_once = True
            waiting.giving_up = asyncio.get_running_loop().call_later(self._wait_s or WAIT_S, _give_up, waiting.result)
            self._lost.append(waiting)

    def _take_back(self) -> None:
        """Queues the lost helper's calls again, before their callers' others, now that none of its lanes can take
        them.
        """
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
        """Returns the caller that has waited longest for its turn, and may have a lane; None without one."""
        if not self._stays:
            return next(iter(self._queues), None)
        return next((caller for caller in self._queues if caller not in self._served), None)


async def _exchange(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, payload: bytes, bounds: Bounds) -> Any:
    """Sends a call. Returns its result, or the exception that it is to raise."""
    writer.write(head_of(payload, bounds))
    for begin in range(0, len(payload), PIECE):  # in pieces, so that a long call does not block the loop
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
    """Reads `size` bytes in pieces, so that a long reply does not block the loop."""
    data = bytearray(size)
    for begin in range(0, size, PIECE):
        end = min(size, begin + PIECE)
        data[begin:end] = await reader.readexactly(end - begin)
    return data


def _unpickled(reply: bytearray) -> tuple[str, Any]:
    """Unpickles a reply. Raises UnpicklingError if it is malformed, as from a fork whose memory was overwritten."""
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
    """Starts the helper without fork(), in which gRPC's fork handlers may crash the child while other threads use gRPC.

    Popen starts programs by vfork, which runs no handlers; uvloop forks.
    """
    return subprocess.Popen(
        dying_with_parent(sys.executable, "-m", "tandem.containment", *arguments),
        env=_environment(), pass_fds=passed, start_new_session=True, stdin=subprocess.DEVNULL,
    )  # fmt: skip


def _end_of(process: subprocess.Popen[bytes]) -> asyncio.Future[int]:
    """Returns the future of a process's exit status, for which a thread waits."""
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
    """Waits for the helper's end, so that an idle helper that died is replaced before the next call.

    Raises:
        EOFError: the helper has ended.
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
