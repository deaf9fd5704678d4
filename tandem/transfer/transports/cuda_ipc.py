"""Two processes on one GPU: payloads lie in slots in the GPU's memory, which the sender owns and the receiver maps.

    slots     allocated by cudaMalloc (torch's allocator gives parts of an allocation, but a handle names a whole one)
    handle    sent with HELLO; the receiver releases slots in a ring in host memory, as with `shm`
    receiver  slot -> staging memory, summed there -> rows: so a payload that was overwritten too early is detected

The sender writes a header only once the device has filled the slot, and the receiver releases it only once the device
has read it, so neither waits for the other's events. Memory of an ended link is reused by the next link. The old link's
receiver may still read it, but gets only bytes with a wrong sum.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import torch

from tandem.transfer.copy.copier import Copier
from tandem.transfer.protocol.wire import INLINE, ControlBody, LinkMessage, parse
from tandem.transfer.transports.base import ReceiveSide, SendSide, Transport, Unusable
from tandem.transfer.transports.device import WORD, CudaDevice, Device, DeviceReceiveSide, DeviceSendSide
from tandem.transfer.transports.shm import HEAD_BYTES, ShmOffer, ShmReceiveSide, ShmSendSide, attached


class Runtime(Protocol):
    """The part of cupy.cuda.runtime that is used here. Its errors are RuntimeErrors."""

    def malloc(self, size: int) -> int: ...
    def ipcGetMemHandle(self, devPtr: int) -> bytes: ...
    def ipcOpenMemHandle(self, handle: bytes) -> int: ...
    def ipcCloseMemHandle(self, devPtr: int) -> None: ...


class CudaIpcOffer(ControlBody):
    device: str
    handle: str
    size: int
    ring: ShmOffer


class CudaIpcSendSide(DeviceSendSide):
    def __init__(self, size: int, transport: CudaIpcTransport) -> None:
        super().__init__(size, transport.device)
        self._transport = transport
        self._pointer = transport.take(self.size)
        try:
            handle = transport.runtime.ipcGetMemHandle(self._pointer).hex()
            self._ring = ShmSendSide(0, Copier())
        except BaseException:
            transport.give(self.size, self._pointer)
            raise
        self.offer = {"device": self._device.identity(), "handle": handle, "size": self.size, "ring": self._ring.offer}

    def allocate(self) -> torch.Tensor:
        return self._device.view(self._pointer, self.size)

    def open(self) -> bytes:
        self._ring.open()
        return super().open()

    def released(self) -> list[int]:
        return [offset - HEAD_BYTES for offset in self._ring.released()]

    def close(self) -> None:
        self._ring.close()
        self._memory = None
        if self._pointer:
            self._transport.give(self.size, self._pointer)
            self._pointer = 0


class CudaIpcReceiveSide(DeviceReceiveSide):
    def __init__(self, transport: CudaIpcTransport, offer: CudaIpcOffer, ring: memoryview) -> None:
        super().__init__("cuda_ipc", transport.device)
        self._transport, self._handle = transport, bytes.fromhex(offer.handle)
        self._ring = ShmReceiveSide(ring, Copier())
        self._slots: torch.Tensor | None = transport.map(self._handle, offer.size)
        self._staging = torch.empty(0, dtype=torch.int64, device=transport.device.place)

    def fault(self, message: LinkMessage) -> str:
        size = len(self._slots) * WORD if self._slots is not None else 0
        if message.offset != INLINE and message.offset % WORD == 0 and message.offset + message.length <= size:
            return ""
        return f"offset {message.offset}, {message.length} bytes: not in this link's memory of {size} bytes"

    def payload(self, message: LinkMessage) -> torch.Tensor:
        assert self._slots is not None
        start, count = message.offset // WORD, -(-message.length // WORD)
        if len(self._staging) < count:
            self._staging = torch.empty(count, dtype=torch.int64, device=self._device.place)
        return self._staging[:count].copy_(self._slots[start : start + count])

    def release(self, messages: Iterable[LinkMessage]) -> None:
        self._ring.release_offsets(message.offset + HEAD_BYTES for message in messages)

    def close(self) -> None:
        if self._slots is not None:
            self._slots = None
            self._transport.unmap(self._handle)


class CudaIpcTransport(Transport):
    """Keeps this sender's memory for later links, and maps each remote memory once for all of its links."""

    name = "cuda_ipc"

    def __init__(self, runtime: Runtime, device: Device) -> None:
        self.runtime, self.device = runtime, device
        self._spare: dict[int, list[int]] = {}
        self._mapped: dict[bytes, tuple[int, int]] = {}  # by handle: its address here, and the number of links

    def offer(self, size: int) -> SendSide:
        try:
            with self.device.queue().use():  # makes the chosen device current on this thread too
                return CudaIpcSendSide(size, self)
        except (OSError, RuntimeError) as error:
            raise Unusable(f"no memory on the device to send from: {error}") from None

    def accept(self, offer: dict[str, Any], max_frame_bytes: int) -> ReceiveSide:
        found, here = parse(CudaIpcOffer, offer), self.device.identity()
        if found.device != here:
            raise Unusable(
                f"the sender's memory is on GPU {found.device}, this is GPU {here}: between two there is nccl"
            )
        ring = attached(found.ring)
        if ring is None:
            raise Unusable("the sender is on another host or in another container")
        try:
            with self.device.queue().use():
                return CudaIpcReceiveSide(self, found, ring)
        except RuntimeError as error:
            raise Unusable(f"the sender's memory cannot be mapped: {error}") from None

    def take(self, size: int) -> int:
        spare = self._spare.get(size)
        return spare.pop() if spare else self.runtime.malloc(size)

    def give(self, size: int, pointer: int) -> None:
        self._spare.setdefault(size, []).append(pointer)

    def map(self, handle: bytes, size: int) -> torch.Tensor:
        pointer, links = self._mapped.get(handle) or (self.runtime.ipcOpenMemHandle(handle), 0)
        self._mapped[handle] = pointer, links + 1
        view = self.device.view(pointer, size)
        if view.data_ptr() != pointer:
            self.unmap(handle)
            raise RuntimeError("torch sees a copy of it, which would stay as it is now")
        return view

    def unmap(self, handle: bytes) -> None:
        pointer, links = self._mapped.pop(handle)
        if links > 1:
            self._mapped[handle] = pointer, links - 1
        else:
            self.runtime.ipcCloseMemHandle(pointer)


def load_cuda_ipc() -> Transport:
    """Makes the transport, which needs cupy and a GPU. Raises Unusable naming what is missing."""
    device = CudaDevice()
    try:
        from cupy.cuda import runtime
    except ImportError as error:
        raise Unusable(f"cupy is missing ({error}): pip install 'tandem[gpu]'") from None
    return CudaIpcTransport(runtime, device)
