"""The helper process, as a program: it runs each call in a fork of itself, so that nothing a call does outlives it.

    owner  ══ one socket per lane ══>  helper: imports what calls need, once
                                         ├─ lane 0: a fork that waits for a call, runs it, replies and exits
                                         └─ lane 1: likewise; the helper says what a fork died of, and forks again

The owner has one call at a time on a lane. If a fork dies while it reads one, or replies, nobody knows where on its
lane the next call or reply begins: the helper ends with it, and its owner starts another.

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
_CALL = struct.Struct("!QddQQ")
REPLY = struct.Struct("!Q")
RETURNED, RAISED, DIED = "returned", "raised", "died"
_LIBC = ctypes.CDLL(None)
_OWNER_IS_GONE = 86
# Below the owner: who burns a whole core in a call still does not take it from those whose tokens pass there.
_NICE = 5


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds of one call. `memory_bytes` is on top of what the helper has imported."""

    cpu_s: float = 4.0
    wall_s: float = 30.0  # for a machine so busy that `cpu_s` takes so long
    memory_bytes: int = 512 * MiB
    stack_bytes: int = 16 * MiB


def head_of(payload: bytes, bounds: Bounds) -> bytes:
    """Head of a call, whose payload is a pickled function and its arguments: size and bounds."""
    return _CALL.pack(len(payload), bounds.cpu_s, bounds.wall_s, bounds.memory_bytes, bounds.stack_bytes)


def main() -> None:
    lanes = [socket.socket(fileno=int(number)) for number in sys.argv[1].split(",")]
    os.nice(_NICE)
    for module in sys.argv[2:]:
        importlib.import_module(module)
    called = mmap.mmap(-1, len(lanes))  # shared with the forks: which of them run one
    gc.freeze()
    running = {_forked(lanes, index, called): index for index in range(len(lanes))}
    while True:
        pid, status = os.wait()
        index, code = running.pop(pid), os.waitstatus_to_exitcode(status)
        if code == _OWNER_IS_GONE:
            return
        if code and not called[index]:
            sys.exit(f"a fork of the helper process ended outside its call: {code}")
        if code:
            _reply(lanes[index], pickle.dumps((DIED, code)))
        running[_forked(lanes, index, called)] = index


def _forked(lanes: list[socket.socket], index: int, called: mmap.mmap) -> int:
    """A fork that serves one call, and what it is called."""
    called[index] = 0
    parent = os.getpid()
    if pid := os.fork():
        return pid
    code = 1
    try:
        _die_with(parent)
        code = _serve(lanes[index], index, called)
    finally:
        os._exit(code)


def _die_with(parent: int) -> None:
    """Have the kernel end this process with its parent, and before others when memory is short."""
    if sys.platform == "linux":
        _LIBC.prctl(1, signal.SIGKILL)
        Path("/proc/self/oom_score_adj").write_text("1000")
    if os.getppid() != parent:
        os._exit(_OWNER_IS_GONE)


def _serve(lane: socket.socket, index: int, called: mmap.mmap) -> int:
    head = _received(lane, _CALL.size)
    if head is None:
        return _OWNER_IS_GONE
    size, cpu_s, wall_s, memory, stack = _CALL.unpack(head)
    payload = _received(lane, size)
    if payload is None:
        return _OWNER_IS_GONE
    called[index] = 1
    replies: list[bytes] = []
    threading.stack_size(stack)
    _limit_memory(memory + stack)
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    signal.setitimer(signal.ITIMER_REAL, wall_s)
    thread = threading.Thread(target=lambda: replies.append(_outcome(payload)))
    thread.start()
    thread.join()
    signal.setitimer(signal.ITIMER_PROF, 0)
    signal.setitimer(signal.ITIMER_REAL, 0)
    called[index] = 0
    _reply(lane, replies[0])
    return 0


def _limit_memory(more: int) -> None:
    statm = Path("/proc/self/statm")
    used = int(statm.read_text().split()[5]) * resource.getpagesize() if statm.exists() else 0
    resource.setrlimit(resource.RLIMIT_DATA, (used + more, used + more))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _outcome(payload: bytes) -> bytes:
    try:
        function, args = pickle.loads(payload)
        return pickle.dumps((RETURNED, function(*args)), protocol=5)
    except BaseException as error:
        return _raised(error)


def _raised(error: BaseException) -> bytes:
    try:
        if not isinstance(error, Exception) or isinstance(error, StopIteration):
            raise TypeError("no future takes it")
        made = pickle.dumps((RAISED, error))
        pickle.loads(made)  # not every exception can be made again from its arguments
    except Exception:
        made = pickle.dumps((RAISED, RuntimeError(f"{type(error).__name__}: {error}")))
    return made


def _reply(lane: socket.socket, reply: bytes) -> None:
    lane.sendall(REPLY.pack(len(reply)))
    lane.sendall(reply)


def _received(lane: socket.socket, size: int) -> Any:
    """So many bytes; None where the owner has closed its end."""
    data = bytearray(size)
    view, count = memoryview(data), 0
    while count < size:
        read = lane.recv_into(view[count:])
        if not read:
            return None
        count += read
    return data
