"""A peer of cupy.cuda.nccl that moves bytes between CPU buffers of threads or processes, and a device with queues.

Like the real one: two-sided (a send waits for its receive, in order), ordered by queue, asynchronous (calls queue,
events tell), an initialisation waits for the other rank for ever, errors of the other side show as asynchronous errors,
an abort ends what waits, late. Sizes that differ never match. Nothing here knows of links or frames.

`driven` queues are stepped by a test, and initialisations return at once; otherwise each queue has a thread.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress

import torch

from tandem.transfer.copy.device_sum import MASK
from tandem.transfer.transports.base import Mark

POLL_SECONDS = 2e-4
FOLLOW_SECONDS = 5.0
damage_next: list[str] = []  # put something there, and a bit of the next payload flips as it is sent
Job = Callable[[], bool]  # one attempt; whether it is done


class NcclError(RuntimeError):
    pass


class FakeEvent:
    done = False

    def query(self) -> bool:
        return self.done


DONE = FakeEvent()
DONE.done = True


class FakeQueue:
    """Jobs, done in order."""

    def __init__(self, pointer: int, driven: bool) -> None:
        self.pointer = pointer
        self._jobs: deque[Job] = deque()
        self._closed = threading.Event()
        if not driven:
            threading.Thread(target=self._run, name="fake-queue", daemon=True).start()

    def use(self) -> AbstractContextManager[object]:
        return nullcontext()

    def record(self) -> FakeEvent:
        event = FakeEvent()

        def mark() -> bool:
            event.done = True
            return True

        self.put(mark)
        return event

    def follow(self, mark: Mark) -> None:
        """The thread stands for the queue of a device: it waits, where it is one's."""
        end = time.monotonic() + FOLLOW_SECONDS
        while not mark.query() and time.monotonic() < end:
            time.sleep(POLL_SECONDS)

    def put(self, job: Job) -> None:
        self._jobs.append(job)

    def step(self) -> bool:
        if self._jobs and self._jobs[0]():
            self._jobs.popleft()
            return True
        return False

    def close(self) -> None:
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.is_set():
            if not self.step():
                time.sleep(POLL_SECONDS)


class FakeDevice:
    """The CPU as a device with queues; every instance is another device, but for those of one `name`."""

    place = torch.device("cpu")

    def __init__(self, driven: bool = False, delay: Callable[[], int] = lambda: 0, name: str = "") -> None:
        self.queues: dict[int, FakeQueue] = {}
        self.computing: FakeEvent | None = None
        self._driven, self._delay, self._name = driven, delay, name
        self._pointers = itertools.count(1)

    def queue(self) -> FakeQueue:
        queue = FakeQueue(next(self._pointers), self._driven)
        self.queues[queue.pointer] = queue
        return queue

    def mark(self) -> FakeEvent:
        """All that this thread has asked for is done, but for what `computing` says."""
        return self.computing or DONE

    def identity(self) -> str:
        return self._name or f"fake-{os.getpid()}-{id(self)}"

    def view(self, pointer: int, size: int) -> torch.Tensor:
        return torch.frombuffer((ctypes.c_char * size).from_address(pointer), dtype=torch.int64)

    def upload(self, words: torch.Tensor) -> torch.Tensor:
        return words

    def fetch(self, number: torch.Tensor) -> Callable[[], int | None]:
        left = iter(range(self._delay()))
        return lambda: None if next(left, None) is not None else int(number) & MASK

    def close(self) -> None:
        for queue in self.queues.values():
            queue.close()


class FakeNccl:
    """One process's. abort_s: how late an abort ends what waits. hang: initialisations never return. connect_s: how
    long a communicator's first exchange connects. num_ids: each has a socket and a thread of the real one."""

    NCCL_UINT8 = 1

    def __init__(self, device: FakeDevice, *, driven: bool = False, abort_s: float = 0.1, hang: bool = False) -> None:
        self.device, self.driven, self.abort_s, self.hang = device, driven, abort_s, hang
        self.now: Callable[[], float] = time.monotonic
        self.closed = False
        self.communicators: list[FakeCommunicator] = []
        self.group: list[Callable[[], None]] | None = None
        self.version = 22809
        self.connect_s = 0.0
        self.num_ids = 0

    def get_version(self) -> int:
        return self.version

    def get_unique_id(self) -> bytes:
        self.num_ids += 1
        return secrets.token_bytes(128)

    def groupStart(self) -> None:
        self.group = []

    def groupEnd(self) -> None:
        calls, self.group = self.group or [], None
        for call in calls:
            call()

    def NcclCommunicator(self, ndev: int, commId: bytes, rank: int, config: object = None) -> FakeCommunicator:
        communicator = FakeCommunicator(self, ndev, commId, rank, config)
        self.communicators.append(communicator)
        while not self.driven and (self.hang or not communicator.connected()):
            time.sleep(POLL_SECONDS)
            if self.closed:
                communicator.destroy()
                raise NcclError("the process ends")
        return communicator

    def close(self) -> None:
        """Ends what would end with a real process."""
        self.closed = True
        for communicator in self.communicators:
            communicator.destroy()
        self.device.close()


class FakeCommunicator:
    """Two ranks: a pair of byte streams. A receive announces its size, and the send of that size answers with bytes."""

    def __init__(self, nccl: FakeNccl, ndev: int, commId: bytes, rank: int, config: object = None) -> None:
        if ndev != 2 or len(commId) != 128 or rank not in (0, 1):
            raise NcclError("invalid argument")
        self._nccl, self._rank = nccl, rank
        self._address = b"\0fake-nccl-" + commId[:32].hex().encode()
        self._listener: socket.socket | None = None
        self._socket: socket.socket | None = None
        self._error = ""
        self._aborted_at: float | None = None
        self._connects_until: float | None = None
        self.num_aborts = 0
        self._ends = threading.Lock()  # one thread connects, another may destroy
        if rank == 0:
            self._listener = socket.socket(socket.AF_UNIX)
            self._listener.setblocking(False)
            self._listener.bind(self._address)
            self._listener.listen(1)

    def connected(self) -> bool:
        with self._ends:
            return bool(self._socket or self._error) or self._connect()

    def _connect(self) -> bool:
        with suppress(BlockingIOError, ConnectionRefusedError):
            if self._listener:
                self._socket = self._listener.accept()[0]
                self._listener.close()
            else:
                sock = socket.socket(socket.AF_UNIX)
                try:
                    sock.connect(self._address)
                except OSError:
                    sock.close()
                    raise
                self._socket = sock
            self._socket.setblocking(False)
        return self._socket is not None

    def send(self, sendbuf: int, count: int, datatype: int, peer: int, stream: int) -> None:
        asked, left = b"", memoryview(b"")
        started = False

        def attempt(sock: socket.socket) -> bool:
            nonlocal asked, left, started
            while len(asked) < 8:
                asked += self._read(sock, 8 - len(asked))
            if not started:
                if int.from_bytes(asked, "little") != count:
                    raise BlockingIOError  # sizes that differ never match
                payload = bytearray(ctypes.string_at(sendbuf, count))
                if damage_next:
                    damage_next.clear()
                    payload[count // 2] ^= 1
                left, started = memoryview(payload), True
            while left:
                left = left[sock.send(left) :]
            return True

        self._queue_call(attempt, datatype, peer, stream)

    def recv(self, recvbuf: int, count: int, datatype: int, peer: int, stream: int) -> None:
        target = (ctypes.c_char * count).from_address(recvbuf)
        view, filled = memoryview(target).cast("B"), 0
        announced = False

        def attempt(sock: socket.socket) -> bool:
            nonlocal filled, announced
            if not announced:
                sock.send(count.to_bytes(8, "little"))
                announced = True
            while filled < count:
                data = self._read(sock, count - filled)
                view[filled : filled + len(data)] = data
                filled += len(data)
            return True

        self._queue_call(attempt, datatype, peer, stream)

    def check_async_error(self) -> None:
        if self._error:
            raise NcclError(self._error)

    def abort(self) -> None:
        """Ends what waits, late; the other side finds its peer gone."""
        self.num_aborts += 1
        self._aborted_at = self._nccl.now()
        while not self._nccl.driven and not self._nccl.closed and not self._is_over():
            time.sleep(POLL_SECONDS)
        if not self._nccl.driven:
            self.destroy()

    def destroy(self) -> None:
        with self._ends:
            for sock in (self._socket, self._listener):
                if sock:
                    sock.close()
            self._socket = self._listener = None
            self._error = self._error or "the communicator was destroyed"

    def rank_id(self) -> int:
        return self._rank

    def size(self) -> int:
        return 2

    def _queue_call(self, attempt: Callable[[socket.socket], bool], datatype: int, peer: int, stream: int) -> None:
        if datatype != self._nccl.NCCL_UINT8 or peer != 1 - self._rank:
            raise NcclError("invalid argument")

        def job() -> bool:
            if self._is_over() or self._nccl.closed:
                self.destroy()
                return True
            if self._aborted_at is not None:
                return False  # no buffer is touched any more, and what waits still waits
            if self._connects():
                return False
            try:
                return self.connected() and self._socket is not None and attempt(self._socket)
            except BlockingIOError:
                return False
            except OSError as error:
                self._error = f"remote process exited or there was a network error: {error}"
                return False  # a kernel that waits for its peer waits until it is aborted

        queue = self._nccl.device.queues[stream]
        if self._nccl.group is None:
            queue.put(job)
        else:
            self._nccl.group.append(lambda: queue.put(job))

    def _connects(self) -> bool:
        if self._connects_until is None:
            self._connects_until = self._nccl.now() + self._nccl.connect_s
        return self._nccl.now() < self._connects_until

    def _is_over(self) -> bool:
        return self._aborted_at is not None and self._nccl.now() - self._aborted_at >= self._nccl.abort_s

    def _read(self, sock: socket.socket, size: int) -> bytes:
        data = sock.recv(size)
        if not data:
            raise ConnectionResetError("closed")
        return data
