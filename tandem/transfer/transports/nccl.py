"""Two GPUs, of one host or two: NCCL sends payloads from slots on the sender's GPU to staging memory on the receiver's.

    HELLO -> WELCOME -> the sender makes a unique id -> OPEN carries it -> both initialise a communicator of two ranks
    sender     FRAME is written to the stream, then its payload is sent: the same order everywhere
    receiver   FRAME comes, then its payload is received, even if it is not wanted: staged, summed, copied to rows
    the end    either side closes the link, which both see, and each aborts its communicator on a separate thread

A payload that was announced and does not come in time ends the link; the next link has a new communicator. An
initialisation cannot be aborted: once MAX_HANGING of them hang, NCCL is no longer offered, until the worker starts
again.
"""

from __future__ import annotations

import atexit
import os
import re
import tempfile
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from tandem.transfer.protocol.endpoint import TransferError
from tandem.transfer.protocol.wire import INLINE, ControlBody, LinkMessage, parse
from tandem.transfer.transports.base import ReceiveSide, SendSide, Slot, Transport, Unusable
from tandem.transfer.transports.device import WORD, CudaDevice, DeviceReceiveSide, DeviceSendSide
from tandem.transfer.transports.nccl_communicator import (
    ID_BYTES,
    INIT_SECONDS,
    RECEIVER,
    SENDER,
    WARM_SECONDS,
    Communicator,
    Communicators,
    Operation,
    thread_communicators,
)

STAGES = 4  # payloads that may be received while an earlier one is copied
# A few channels are enough: a link has one peer, each channel has its own buffers, and the device's cores are for
# computing. cupy cannot set the number for one communicator, so it is set for the process.
FEW_CHANNELS = {"NCCL_MAX_CTAS": "8", "NCCL_MAX_P2P_NCHANNELS": "8"}


class NcclOffer(ControlBody):
    device: str
    version: int


class NcclSendSide(DeviceSendSide):
    open_s = INIT_SECONDS + WARM_SECONDS

    def __init__(self, size: int, transport: NcclTransport) -> None:
        super().__init__(size, transport.all.device)
        self._transport = transport
        self._comm: Communicator | None = None
        self.offer = NcclOffer(device=self._device.identity(), version=transport.all.nccl.get_version()).model_dump()
        transport.all.hold(self, "this worker")

    def open(self) -> bytes:
        super().open()
        unique_id = self._transport.all.new_id()
        self._comm = self._transport.all.open(self, unique_id, SENDER)
        return unique_id

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
        self._transport.all.release(self)
        if self._comm:
            self._comm.close()


class NcclReceiveSide(DeviceReceiveSide):
    """Receives payloads in the order of their headers, a few ahead; drops unwanted payloads once they have come."""

    def __init__(self, transport: NcclTransport, max_frame_bytes: int) -> None:
        super().__init__("nccl", transport.all.device)
        self._transport, self._max_frame_bytes = transport, max_frame_bytes
        self._comm: Communicator | None = None
        self._announced: deque[LinkMessage] = deque()
        self._released: set[int] = set()  # ids of messages, as are the keys of `_staged`
        self._staged: dict[int, torch.Tensor] = {}
        self._free: list[torch.Tensor] = [torch.empty(0)] * STAGES
        transport.all.hold(self, "the receiver")

    def opened(self, said: bytes) -> None:
        """Starts initialising the communicator, as the sender does, with the unique id in `said`."""
        if len(said) != ID_BYTES or self._comm is not None:
            raise TransferError("FAILED_PRECONDITION", f"OPEN: {ID_BYTES} bytes of NCCL's id are wanted, once")
        self._comm = self._transport.all.open(self, said, RECEIVER)

    def fault(self, message: LinkMessage) -> str:
        return "" if message.offset != INLINE else "inline, on a link whose payloads go by NCCL"

    def announced(self, message: LinkMessage) -> None:
        if message.length > self._max_frame_bytes:
            raise TransferError(
                "DATA_LOSS", f"{message.length} bytes announced, at most {self._max_frame_bytes} are allowed"
            )
        if self._comm is None:
            raise TransferError("FAILED_PRECONDITION", "a payload before OPEN")
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
        self._transport.all.release(self)
        if self._comm:
            self._comm.close()

    def _first(self) -> Operation | None:
        """Returns the oldest payload not released yet; first frees the memory of released payloads that have come."""
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
    """Makes NCCL sides. shared_gpu: True if two ranks may be on one GPU."""

    name = "nccl"

    def __init__(self, all_of_them: Communicators, *, shared_gpu: bool = False, log: Path | None = None) -> None:
        self.all = all_of_them
        self._shared_gpu, self._log = shared_gpu, log

    def carrier(self) -> str:
        """Returns the networks of NCCL's channels to its peers, from its log; sockets if nothing faster is there."""
        with suppress(OSError, AttributeError):
            return ", ".join(sorted(carriers(self._log.read_text(encoding="utf-8"))))  # type: ignore[union-attr]
        return ""

    def offer(self, size: int) -> SendSide:
        return NcclSendSide(size, self)

    def accept(self, offer: dict[str, Any], max_frame_bytes: int) -> ReceiveSide:
        found, here = parse(NcclOffer, offer), self.all.device.identity()
        version = self.all.nccl.get_version()
        if found.version != version:
            raise Unusable(f"NCCL {found.version} at the sender, {version} at the receiver")
        if found.device == here and not self._shared_gpu:
            raise Unusable(f"both are on GPU {found.device}: NCCL wants two, or NCCL_HOSTID set differently for each")
        return NcclReceiveSide(self, max_frame_bytes)


def carriers(log: str) -> set[str]:
    """Returns the networks named in NCCL's log; NET/Socket for a line such as
    `… NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/Socket/0`."""
    return {"/".join(found.split("/")[:2]) for found in re.findall(r" NCCL INFO Channel .* via (\S+)", log)}


def _logged() -> Path | None:
    """Has NCCL log its choices to a file, unless the user has set up a log. Call before NCCL is loaded."""
    if "NCCL_DEBUG" in os.environ:
        return None
    log = Path(tempfile.gettempdir()) / f"tandem-nccl-{os.getpid()}.log"
    os.environ |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,P2P,SHM,NET", "NCCL_DEBUG_FILE": str(log)}
    atexit.register(log.unlink, missing_ok=True)
    return log


def load_nccl() -> Transport:
    """Makes the transport, which needs cupy, NCCL and a GPU. Raises Unusable naming what is missing."""
    log = _logged()
    for name, value in FEW_CHANNELS.items():
        os.environ.setdefault(name, value)
    try:
        from cupy.cuda import nccl
    except ImportError as error:
        raise Unusable(f"cupy is missing ({error}): pip install 'tandem[gpu]'") from None
    if not nccl.available:
        raise Unusable("NCCL's library is missing: pip install nvidia-nccl-cu13")
    shared_gpu = "NCCL_HOSTID" in os.environ or os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
    return NcclTransport(thread_communicators(nccl, CudaDevice()), shared_gpu=shared_gpu, log=log)
