"""NCCL communicators of two ranks, one for each link: initialised, warmed, used and aborted without blocking a link.

    initialise ─> warm: one word goes over it, which connects its channels ─> payloads, in order ─> abort

Each call that may block runs on the communicator's own thread, its lane; an abort runs on another thread, because it
may be the only way to end a blocked call. The first exchange connects, which may take long, so the time limit of
payloads begins only after it. A worker has at most MAX_COMMUNICATORS, because each takes device memory.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from tandem.transfer.protocol.endpoint import TransferError
from tandem.transfer.protocol.wire import LinkMessage
from tandem.transfer.transports.base import Mark, Unusable
from tandem.transfer.transports.device import WORD, Device, Queue

INIT_SECONDS = 5.0
WARM_SECONDS = 5.0  # the time limit of the first exchange
PAYLOAD_SECONDS = 1.0  # the time limit from the header to the payload's last byte
MAX_HANGING = 2
MAX_COMMUNICATORS = 32
SENDER, RECEIVER = 0, 1  # the ranks of the two sides
ID_BYTES = 128


class Comm(Protocol):
    """The part of cupy.cuda.nccl.NcclCommunicator that is used here."""

    def send(self, sendbuf: int, count: int, datatype: int, peer: int, stream: int) -> None: ...
    def recv(self, recvbuf: int, count: int, datatype: int, peer: int, stream: int) -> None: ...
    def check_async_error(self) -> None: ...
    def abort(self) -> None: ...


class Nccl(Protocol):
    """The part of cupy.cuda.nccl that is used here."""

    NCCL_UINT8: int

    def get_version(self) -> int: ...
    def get_unique_id(self) -> bytes: ...
    def NcclCommunicator(self, ndev: int, commId: bytes, rank: int) -> Comm: ...


class Lane(Protocol):
    """Runs jobs one after another on another thread."""

    def submit(self, job: Callable[[], None]) -> None: ...
    def close(self) -> None:
        """Ends the lane after the queued jobs."""


class ThreadLane:
    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.submit = self._jobs.put
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def close(self) -> None:
        self._jobs.put(None)

    def _run(self) -> None:
        while job := self._jobs.get():
            job()


class Communicators:
    """A worker's communicators. `held`: sides of links, from their offer on, and communicators, until aborted.

    starting: initialisations that have not returned, with their deadlines. broken: why NCCL makes no ids here; or "".
    """

    def __init__(self, nccl: Nccl, device: Device, lane: Callable[[str], Lane], now: Callable[[], float]) -> None:
        self.nccl, self.device, self.lane, self.now = nccl, device, lane, now
        self.held: set[object] = set()
        self.starting: dict[Communicator, float] = {}
        self.broken = ""

    def hold(self, side: object, which: str) -> None:
        """Reserves a communicator's place for `side`, until its communicator opens or it is released.

        Raises Unusable.
        """
        now = self.now()
        hanging = sum(now >= ready_by for ready_by in list(self.starting.values()))
        if hanging >= MAX_HANGING:
            raise Unusable(f"{hanging} NCCL initialisations hang: restart {which}")
        if self.broken:
            raise Unusable(f"NCCL does not start: {self.broken}")
        if len(self.held) >= MAX_COMMUNICATORS:
            raise Unusable(f"{which} has {MAX_COMMUNICATORS} NCCL communicators, as many as it makes")
        self.held.add(side)

    def new_id(self) -> bytes:
        """Returns a unique id for a link that both sides want; each id costs a socket and a thread.

        Raises TransferError.
        """
        try:
            return self.nccl.get_unique_id()
        except (RuntimeError, KeyError) as error:
            self.broken = said(error)
            raise TransferError("UNAVAILABLE", f"NCCL does not start: {self.broken}") from None

    def open(self, side: object, unique_id: bytes, rank: int) -> Communicator:
        communicator = Communicator(self, unique_id, rank)
        self.held.add(communicator)
        self.held.discard(side)
        return communicator

    def release(self, holder: object) -> None:
        self.held.discard(holder)


@dataclass(slots=True)
class Operation:
    """A payload being sent or received. done: its last byte has been sent or received."""

    message: LinkMessage
    words: torch.Tensor
    deadline: float
    event: Mark | None = None

    @property
    def done(self) -> bool:
        return self.event is not None and self.event.query()


class Communicator:
    """A link's communicator, made once both sides want it. pending: operations not known to be done."""

    def __init__(self, all_of_them: Communicators, unique_id: bytes, rank: int) -> None:
        self.pending: deque[Operation] = deque()
        self._all, self._rank = all_of_them, rank
        self._lane = all_of_them.lane("kv-nccl")
        self._queue: Queue = all_of_them.device.queue()
        self._word = torch.zeros(1, dtype=torch.int64, device=all_of_them.device.place)
        self._warmed: Mark | None = None
        self._ready = False
        self._comm: Comm | None = None
        self._error: TransferError | None = None
        self._closed = False
        self._ends = threading.Lock()  # only one of lane and link may abort
        self._ready_by = all_of_them.starting[self] = all_of_them.now() + INIT_SECONDS
        self._lane.submit(lambda: self._initialise(unique_id))

    def send(self, message: LinkMessage, words: torch.Tensor) -> None:
        self._submit(message, words)

    def receive(self, message: LinkMessage, words: torch.Tensor) -> None:
        self._submit(message, words)

    def check(self) -> None:
        """Raises TransferError once NCCL has failed or exceeded a time limit."""
        now = self._all.now()
        if self._comm:
            self._guarded(self._comm.check_async_error)
        if not self._ready:
            self._look_ready(now)
        elif self.pending:
            first = self.pending[0]
            if now >= max(first.deadline, self._ready_by) and not first.done:
                self._fail("UNAVAILABLE", f"a payload took more than {PAYLOAD_SECONDS} s")
        if self._error:
            raise self._error.fresh()

    def close(self) -> None:
        """Aborts on another thread, because an abort may hang. Memory of operations lives until the abort returns."""
        with self._ends:
            closed, self._closed, comm = self._closed, True, self._comm
        if not closed:
            self._lane.close()
            if comm:
                self._abort(comm)

    def _look_ready(self, now: float) -> None:
        if self._warmed is not None and self._warmed.query():
            self._ready, self._ready_by = True, now + PAYLOAD_SECONDS  # payloads move only from now on
        elif now >= self._ready_by:
            what = f"not ready in {INIT_SECONDS}" if self._comm is None else f"no word came over it in {WARM_SECONDS}"
            self._fail("UNAVAILABLE", f"{what} s")

    def _submit(self, message: LinkMessage, words: torch.Tensor) -> None:
        operation = Operation(message, words, self._all.now() + PAYLOAD_SECONDS)
        self.pending.append(operation)

        def run() -> None:
            if self._comm and not self._error and not self._closed:
                operation.event = self._exchange(self._comm, words)

        self._lane.submit(run)

    def _exchange(self, comm: Comm, words: torch.Tensor) -> Mark:
        """Queues a send or receive on the lane; returns a mark after it. If queuing failed, `_error` is set."""
        call = comm.send if self._rank == SENDER else comm.recv
        what = words.data_ptr(), len(words) * WORD, self._all.nccl.NCCL_UINT8, 1 - self._rank
        with self._queue.use():
            self._guarded(lambda: call(*what, self._queue.pointer))
            return self._queue.record()

    def _initialise(self, unique_id: bytes) -> None:
        with self._queue.use():
            self._guarded(lambda: self._initialised(self._all.nccl.NcclCommunicator(2, unique_id, self._rank)))
        del self._all.starting[self]
        if self._comm is None:
            self._all.release(self)

    def _initialised(self, comm: Comm) -> None:
        with self._ends:
            self._comm, closed = comm, self._closed
        if closed:
            self._abort(comm)
        else:
            self._ready_by = self._all.now() + WARM_SECONDS
            self._warmed = self._exchange(comm, self._word)

    def _abort(self, comm: Comm) -> None:
        lane, kept = self._all.lane("kv-nccl-abort"), [self, comm]

        def run() -> None:
            with self._queue.use():
                self._guarded(comm.abort)
            kept.clear()
            self._all.release(self)

        lane.submit(run)
        lane.close()

    def _guarded(self, call: Callable[[], None]) -> None:
        """Calls NCCL; an error ends the link. cupy raises a KeyError for an NCCL error that it has no name for."""
        try:
            call()
        except (RuntimeError, KeyError) as error:
            self._fail("UNAVAILABLE", said(error))

    def _fail(self, code: str, why: str) -> None:
        self._error = self._error or TransferError(code, f"NCCL: {why}")


def said(error: Exception) -> str:
    return repr(error) if isinstance(error, KeyError) else str(error)


def thread_communicators(nccl: Nccl, device: Device) -> Communicators:
    return Communicators(nccl, device, ThreadLane, time.monotonic)
