"""The helper process's program: it runs each call in a fork of itself, so that nothing a call does outlives the call.

    owner  ══ one socket per lane ══>  helper: imports what calls need, once
                                         ├─ lane 0: a fork that waits for a call, runs it, replies and exits
                                         └─ lane 1: likewise; the helper reports how a fork died, and forks again

The owner has one call at a time on a lane. If a fork dies while it reads a call, or replies, it is unknown where on its
lane the next call or reply begins: so the helper ends, and its owner starts another.

For calls that must be fast, a fork may stay for many calls: it keeps what they have cached, and ends with the first
call that harms it.

A fork bounds itself before it runs its call: CPU and wall-clock time by timers whose signals end it, memory by an
rlimit, stack by the size of the thread that the call runs on. This file imports no more than that needs.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import mmap
import os
import pickle
import resource
import signal
import socket
import struct
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MiB = 2**20
_CALL = struct.Struct("!QddQQ?")
REPLY = struct.Struct("!Q")
RETURNED, RAISED, DIED = "returned", "raised", "died"
STAYS, LEAVES = "stays", "leaves"  # what a fork does after a call
_LIBC = ctypes.CDLL(None)
_OWNER_IS_GONE = 86
# Lower priority than the owner's: a call that uses a whole core does not take it from the tokens that pass there.
_NICE = 5
# A fork that stays is replaced after so many calls, as what they leave in memory adds up.
_MOST_CALLS = 10_000


@dataclass(frozen=True, slots=True)
class Bounds:
    """The bounds of one call.

    Args:
        memory_bytes: in addition to what the helper has imported.
        is_last: a fork that stays for many calls ends with this one, and its caches with it.
    """

    cpu_s: float = 4.0
    wall_s: float = 30.0  # bounds a call on a machine too busy to give it `cpu_s` in time
    memory_bytes: int = 512 * MiB
    stack_bytes: int = 16 * MiB
    is_last: bool = False


def head_of(payload: bytes, bounds: Bounds) -> bytes:
    """Returns the head of a call: its bounds and the size of its payload, a pickled function and its arguments."""
    said = bounds.cpu_s, bounds.wall_s, bounds.memory_bytes, bounds.stack_bytes, bounds.is_last
    return _CALL.pack(len(payload), *said)


def main() -> None:
    lanes = [socket.socket(fileno=int(number)) for number in sys.argv[1].split(",")]
    most_calls = _MOST_CALLS if sys.argv[2] == STAYS else 1
    os.nice(_NICE if most_calls == 1 else 0)
    for module in sys.argv[3:]:
        importlib.import_module(module)
    called = mmap.mmap(-1, len(lanes))  # shared with the forks: for each lane, if it runs a call
    gc.freeze()
    running = {_forked(lanes, index, called, most_calls): index for index in range(len(lanes))}
    while True:
        pid, status = os.wait()
        index, code = running.pop(pid), os.waitstatus_to_exitcode(status)
        if code == _OWNER_IS_GONE:
            return
        if code and not called[index]:
            sys.exit(f"a fork of the helper process ended outside its call: {code}")
        if code:
            _reply(lanes[index], pickle.dumps((DIED, code)))
        running[_forked(lanes, index, called, most_calls)] = index


def _forked(lanes: list[socket.socket], index: int, called: mmap.mmap, most_calls: int) -> int:
    """Starts a fork that serves calls; returns its process id."""
    called[index] = 0
    parent = os.getpid()
    if pid := os.fork():
        return pid
    code = 1
    try:
        _die_with(parent)
        code = _Fork(lanes[index], index, called).serve(most_calls)
    finally:
        os._exit(code)


def _die_with(parent: int) -> None:
    """Makes the kernel kill this process with its parent, and first of all when memory is short."""
    if sys.platform == "linux":
        _LIBC.prctl(1, signal.SIGKILL)
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="utf-8")
    if os.getppid() != parent:
        os._exit(_OWNER_IS_GONE)


class _Fork:
    """Serves the calls of one lane, each within its own bounds. `called`: the lanes that run a call."""

    def __init__(self, lane: socket.socket, index: int, called: mmap.mmap) -> None:
        self._lane, self._index, self._called = lane, index, called
        self._code, self._used = 1, 0

    def serve(self, most_calls: int) -> int:
        """Serves calls, at most `most_calls`, until the owner is gone. Returns the exit status.

        All calls have the stack size of the first.
        """
        first = self._received()
        if first is None:
            return _OWNER_IS_GONE
        threading.stack_size(first[1].stack_bytes)
        self._used = _data_bytes()
        thread = threading.Thread(target=self._work, args=(first, most_calls))
        thread.start()
        thread.join()
        return self._code

    def _work(self, call: tuple[bytearray, Bounds] | None, most_calls: int) -> None:
        for left in reversed(range(most_calls)):
            if call is None:
                self._code = _OWNER_IS_GONE
                return
            payload, bounds = call
            is_last = not left or bounds.is_last
            if not self._run(payload, bounds, is_last) or is_last:
                break
            call = self._received()
        self._code = 0

    def _run(self, payload: bytearray, bounds: Bounds, is_last: bool) -> bool:
        """Runs a call and replies. Returns False if it has used up the memory: the next call might have none left."""
        self._called[self._index] = 1
        _limit_memory(self._used + bounds.memory_bytes + bounds.stack_bytes, is_last)
        signal.setitimer(signal.ITIMER_PROF, bounds.cpu_s)
        signal.setitimer(signal.ITIMER_REAL, bounds.wall_s)
        reply, lasting = _outcome(payload)
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        self._called[self._index] = 0
        _reply(self._lane, reply)
        return lasting

    def _received(self) -> tuple[bytearray, Bounds] | None:
        """Returns the next call; None if the owner is gone."""
        head = _received(self._lane, _CALL.size)
        if head is None:
            return None
        size, *bounds = _CALL.unpack(head)
        payload = _received(self._lane, size)
        return None if payload is None else (payload, Bounds(*bounds))


def _limit_memory(most: int, is_last: bool) -> None:
    """Bounds this process's memory. `is_last`: irrevocably, as no call with another bound follows."""
    resource.setrlimit(resource.RLIMIT_DATA, (most, most if is_last else resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _data_bytes() -> int:
    statm = Path("/proc/self/statm")
    return int(statm.read_text(encoding="utf-8").split()[5]) * resource.getpagesize() if statm.exists() else 0


def _outcome(payload: bytearray) -> tuple[bytes, bool]:
    """Returns the reply, and False if the memory was used up."""
    try:
        function, args = pickle.loads(payload)
        return pickle.dumps((RETURNED, function(*args)), protocol=5), True
    except BaseException as error:
        return _raised(error), not isinstance(error, MemoryError)


def _raised(error: BaseException) -> bytes:
    try:
        if not isinstance(error, Exception) or isinstance(error, StopIteration):
            raise TypeError("no future takes it")
        made = pickle.dumps((RAISED, error))
        pickle.loads(made)  # some exceptions cannot be unpickled
    except Exception:
        made = pickle.dumps((RAISED, RuntimeError(f"{type(error).__name__}: {error}")))
    return made


def _reply(lane: socket.socket, reply: bytes) -> None:
    lane.sendall(REPLY.pack(len(reply)))
    lane.sendall(reply)


def _received(lane: socket.socket, size: int) -> Any:
    """Returns the next `size` bytes; None if the owner has closed its end."""
    data = bytearray(size)
    view, count = memoryview(data), 0
    while count < size:
        read = lane.recv_into(view[count:])
        if not read:
            return None
        count += read
    return data
