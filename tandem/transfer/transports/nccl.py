"""Two GPUs, of one host or two: payloads go by NCCL, from slots on the sender's to staging memory on the receiver's.

    HELLO carries a new unique id -> WELCOME -> both initialise a communicator of two ranks, for this link alone
    sender     FRAME is written to the stream, then its payload is sent: the same order everywhere
    receiver   FRAME comes, then its payload is received, even where it is not wanted: staged, summed, copied to rows
    the end    either side closes the link, which both see, and each aborts its communicator on a thread of its own

Each call that may block runs on a thread of the link's own, its lane. A payload that was announced and does not come in
time ends the link; the next link has a new communicator. An initialisation cannot be aborted: once MAX_HANGING of them
hang, NCCL is no longer offered, until the worker starts again.
"""

from __future__ import annotations

import atexit
import os
import queue
import re
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from tandem.transfer.protocol.endpoint import TransferError
from tandem.transfer.protocol.wire import INLINE, ControlBody, LinkMessage, parse
from tandem.transfer.transports.base import Mark, ReceiveSide, SendSide, Slot, Transport, Unusable
from tandem.transfer.transports.device import (
    WORD,
    CudaDevice,
    Device,
    DeviceReceiveSide,
    DeviceSendSide,
    Queue,
)

INIT_SECONDS = 5.0
PAYLOAD_SECONDS = 1.0  # from the header to the payload's last byte
MAX_HANGING = 2
STAGES = 4  # payloads that may be received ahead of the one that is copied
SENDER, RECEIVER = 0, 1  # ranks


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
    """Runs jobs one after another, elsewhere."""

    def submit(self, job: Callable[[], None]) -> None: ...
    def close(self) -> None:
        """After the jobs that are queued."""


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


class NcclOffer(ControlBody):
    unique_id: str
    device: str
    version: int


@dataclass(slots=True)
class Operation:
    """One payload sent or received. done: its last byte has gone, or come."""

    message: LinkMessage
    words: torch.Tensor
    deadline: float
    event: Mark | None = None

    @property
    def done(self) -> bool:
        return self.event is not None and self.event.query()


class Communicator:
    """A link's, from the moment that both sides are there. pending: operations that have not been seen done."""

    def __init__(self, transport: NcclTransport, unique_id: bytes, rank: int) -> None:
        self.pending: deque[Operation] = deque()
        self._transport, self._rank = transport, rank
        self._lane = transport.lane("kv-nccl")
        self._queue: Queue = transport.device.queue()
        self._comm: Comm | None = None
        self._error: TransferError | None = None
        self._closed = False
        self._ready_by = transport.starting[self] = transport.now() + INIT_SECONDS
        self._lane.submit(lambda: self._initialise(unique_id))

    def send(self, message: LinkMessage, words: torch.Tensor) -> None:
        self._submit(message, words, lambda comm, *what: comm.send(*what))

    def receive(self, message: LinkMessage, words: torch.Tensor) -> None:
        self._submit(message, words, lambda comm, *what: comm.recv(*what))

    def check(self) -> None:
        """Raises TransferError once NCCL has failed, or something has taken too long."""
        now = self._transport.now()
        if self._comm is None and now >= self._ready_by:
            self._fail("UNAVAILABLE", f"not ready in {INIT_SECONDS} s")
        elif self._comm:
            self._guarded(self._comm.check_async_error)
            first = self.pending[0] if self.pending else None
            if first and now >= max(first.deadline, self._ready_by) and not first.done:
                self._fail("UNAVAILABLE", f"a payload took more than {PAYLOAD_SECONDS} s")
        if self._error:
            raise self._error.fresh()

    def close(self) -> None:
        """Aborts, on another thread: it may hang. The memory of its operations lives until that has returned."""
        if not self._closed:
            self._closed = True
            self._lane.close()
            if self._comm:
                self._abort(self._comm)

    def _submit(self, message: LinkMessage, words: torch.Tensor, call: Callable[..., None]) -> None:
        operation = Operation(message, words, self._transport.now() + PAYLOAD_SECONDS)
        self.pending.append(operation)

        def run() -> None:
            if self._comm and not self._error and not self._closed:
                what = words.data_ptr(), len(words) * WORD, self._transport.nccl.NCCL_UINT8, 1 - self._rank
                with self._queue.use():
                    self._guarded(lambda: call(self._comm, *what, self._queue.pointer))
                    operation.event = self._queue.record()

        self._lane.submit(run)

    def _initialise(self, unique_id: bytes) -> None:
        with self._queue.use():
            self._guarded(lambda: self._initialised(self._transport.nccl.NcclCommunicator(2, unique_id, self._rank)))
        del self._transport.starting[self]

    def _initialised(self, comm: Comm) -> None:
        self._ready_by = self._transport.now() + PAYLOAD_SECONDS  # only now do payloads begin to move
        self._comm = comm
        if self._closed:
            self._abort(comm)

    def _abort(self, comm: Comm) -> None:
        lane, kept = self._transport.lane("kv-nccl-abort"), [self, comm]

        def run() -> None:
            with self._queue.use():
                self._guarded(comm.abort)
            kept.clear()

        lane.submit(run)
        lane.close()

    def _guarded(self, call: Callable[[], None]) -> None:
        """NCCL's errors end the link: of cupy's NcclError, which is a KeyError where cupy has no name for one."""
        try:
            call()
        except (RuntimeError, KeyError) as error:
            self._fail("UNAVAILABLE", repr(error) if isinstance(error, KeyError) else str(error))

    def _fail(self, code: str, why: str) -> None:
        self._error = self._error or TransferError(code, f"NCCL: {why}")


class NcclSendSide(DeviceSendSide):
    open_s = INIT_SECONDS

    def __init__(self, size: int, transport: NcclTransport) -> None:
        super().__init__(size, transport.device)
        self._transport = transport
        self._unique_id = transport.nccl.get_unique_id()
        self._comm: Communicator | None = None
        self.offer = NcclOffer(
            unique_id=self._unique_id.hex(), device=transport.device.identity(), version=transport.nccl.get_version()
        ).model_dump()

    def open(self) -> None:
        super().open()
        self._comm = Communicator(self._transport, self._unique_id, SENDER)

    def sent(self, messages: Sequence[LinkMessage]) -> None:
        for message in messages:
            if message.slot >= 0 and self._comm:
                self._comm.send(message, self.words(Slot(message.slot, message.length)))

    def released(self) -> list[int]:
        found: list[int] = []
        while self._comm and self._comm.pending and self._comm.pending[0].done:
            found.append(self._comm.pending.popleft().message.slot)
        return found

    def carrier(self) -> str:
        return self._transport.carrier()

    def check(self) -> None:
        if self._comm:
            self._comm.check()

    def close(self) -> None:
        if self._comm:
            self._comm.close()


class NcclReceiveSide(DeviceReceiveSide):
    """Payloads are received in the order of their headers, a few ahead; the unwanted are dropped as they come."""

    def __init__(self, transport: NcclTransport, unique_id: bytes, max_frame_bytes: int) -> None:
        super().__init__("nccl", transport.device)
        self._transport, self._unique_id, self._max_frame_bytes = transport, unique_id, max_frame_bytes
        self._comm: Communicator | None = None
        self._announced: deque[LinkMessage] = deque()
        self._released: set[int] = set()  # by the message's identity, like the next
        self._staged: dict[int, torch.Tensor] = {}
        self._free: list[torch.Tensor] = [torch.empty(0)] * STAGES

    def fault(self, message: LinkMessage) -> str:
        return "" if message.offset != INLINE else "inline, on a link whose payloads go by NCCL"

    def announced(self, message: LinkMessage) -> None:
        if message.length > self._max_frame_bytes:
            raise TransferError(
                "DATA_LOSS", f"{message.length} bytes announced, at most {self._max_frame_bytes} are allowed"
            )
        if self._comm is None:  # the sender has the WELCOME, and initialises too
            self._comm = Communicator(self._transport, self._unique_id, RECEIVER)
        self._announced.append(message)
        self._receive(self._comm)

    def arrived(self, message: LinkMessage) -> bool:
        first = self._first()
        return first is not None and first.message is message and first.done

    def payload(self, message: LinkMessage) -> torch.Tensor:
        return self._staged[id(message)]

    def release(self, messages: Iterable[LinkMessage]) -> None:
        self._released |= {id(message) for message in messages}
        self._first()

    def check(self) -> None:
        if self._comm:
            self._first()
            self._comm.check()

    def close(self) -> None:
        if self._comm:
            self._comm.close()

    def _first(self) -> Operation | None:
        """The oldest payload that is wanted; before it, frees the memory of those that have come and are not."""
        if self._comm is None:
            return None
        pending = self._comm.pending
        while pending and id(pending[0].message) in self._released and pending[0].done:
            message = pending.popleft().message
            self._released.remove(id(message))
            self._free.append(self._staged.pop(id(message)))
        self._receive(self._comm)
        return pending[0] if pending else None

    def _receive(self, comm: Communicator) -> None:
        while self._announced and self._free:
            message, memory = self._announced.popleft(), self._free.pop()
            count = -(-message.length // WORD)
            if len(memory) != count:
                memory = torch.zeros(count, dtype=torch.int64, device=self._device.place)
            self._staged[id(message)] = memory
            comm.receive(message, memory)


class NcclTransport(Transport):
    """shared_gpu: whether two ranks may be on one. starting: initialisations that have not returned, and by when."""

    name = "nccl"

    def __init__(
        self, nccl: Nccl, device: Device, *, shared_gpu: bool = False, log: Path | None = None,
        lane: Callable[[str], Lane] = ThreadLane, now: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.nccl, self.device, self.lane, self.now = nccl, device, lane, now
        self.starting: dict[Communicator, float] = {}
        self._shared_gpu, self._log = shared_gpu, log

    def carrier(self) -> str:
        """By NCCL's own account: how the channels to its peers go. Sockets, where faster is missing, are among them."""
        with suppress(OSError, AttributeError):
            return ", ".join(sorted(carriers(self._log.read_text())))  # type: ignore[union-attr]
        return ""

    def offer(self, size: int) -> SendSide:
        self._check("this worker")
        return NcclSendSide(size, self)

    def accept(self, offer: dict[str, Any], max_frame_bytes: int) -> ReceiveSide:
        self._check("the receiver")
        found = parse(NcclOffer, offer)
        if found.version != self.nccl.get_version():
            raise Unusable(f"NCCL {found.version} at the sender, {self.nccl.get_version()} at the receiver")
        if found.device == self.device.identity() and not self._shared_gpu:
            raise Unusable(f"both are on GPU {found.device}: NCCL wants two, or NCCL_HOSTID set differently for each")
        return NcclReceiveSide(self, bytes.fromhex(found.unique_id), max_frame_bytes)

    def _check(self, which: str) -> None:
        now = self.now()
        hanging = sum(now >= ready_by for ready_by in list(self.starting.values()))
        if hanging >= MAX_HANGING:
            raise Unusable(f"{hanging} NCCL initialisations hang: restart {which}")


def carriers(log: str) -> set[str]:
    """Networks named in NCCL's log, such as `… NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/Socket/0`:
    NET/Socket."""
    return {"/".join(found.split("/")[:2]) for found in re.findall(r" NCCL INFO Channel .* via (\S+)", log)}


def _logged() -> Path | None:
    """Has NCCL write its choices to a file, unless the user has asked for its log. Call before it is loaded."""
    if "NCCL_DEBUG" in os.environ:
        return None
    log = Path(tempfile.gettempdir()) / f"tandem-nccl-{os.getpid()}.log"
    os.environ |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,P2P,SHM,NET", "NCCL_DEBUG_FILE": str(log)}
    atexit.register(log.unlink, missing_ok=True)
    return log


def load_nccl() -> Transport:
    """With cupy and a GPU. Raises Unusable saying what is missing."""
    log = _logged()
    try:
        from cupy.cuda import nccl
    except ImportError as error:
        raise Unusable(f"cupy is missing ({error}): pip install 'tandem[gpu]'") from None
    if not nccl.available:
        raise Unusable("NCCL's library is missing: pip install nvidia-nccl-cu13")
    shared_gpu = "NCCL_HOSTID" in os.environ or os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
    return NcclTransport(nccl, CudaDevice(), shared_gpu=shared_gpu, log=log)
