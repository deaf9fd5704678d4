"""Payloads in this machine's memory, and the transport that sends payloads within the stream."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tandem.transfer.copy.copier import Copier, load_copier
from tandem.transfer.copy.rows import Rows
from tandem.transfer.protocol.wire import INLINE, LinkMessage, checksum
from tandem.transfer.transports.base import Mark, ReceiveSide, SendSide, Slot, Transport


class HostSendSide(SendSide):
    """A sender's slots in this machine's memory, `view`."""

    view: memoryview

    def __init__(self, size: int, copier: Copier) -> None:
        super().__init__(size)
        self._copier = copier

    def payload(self, slot: Slot) -> memoryview:
        return self.view[slot.offset : slot.offset + slot.nbytes]

    def gather(self, rows: Rows, ids: NDArray[np.int64], slot: Slot, behind: Mark | None = None) -> int:
        return self._copier.gather(rows, ids, self.payload(slot), past_caches=False)

    def write(self, data: bytes, slot: Slot) -> int:
        self.payload(slot)[:] = data
        return checksum(data)


class HostReceiveSide(ReceiveSide):
    def __init__(self, name: str, copier: Copier) -> None:
        self.name, self._copier = name, copier

    def payload(self, message: LinkMessage) -> memoryview:
        return memoryview(message.body)

    def scatter(self, message: LinkMessage, rows: Rows, ids: NDArray[np.int64]) -> int:
        return self._copier.scatter(self.payload(message), rows, ids)

    def checksum(self, message: LinkMessage) -> int:
        return checksum(self.payload(message))

    def fault(self, message: LinkMessage) -> str:
        return "" if message.offset == INLINE else f"offset {message.offset}: {self.name} has no shared memory"


class InlineSendSide(HostSendSide):
    """Private memory, allocated once the receiver takes the offer; a slot is free once the stream has its bytes."""

    inline = True

    def __init__(self, size: int, copier: Copier) -> None:
        super().__init__(size, copier)
        self._released: list[int] = []

    def open(self) -> bytes:
        self.view = memoryview(mmap.mmap(-1, self.size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        return b""

    def body(self, slot: Slot) -> memoryview:
        return self.payload(slot)

    def sent(self, messages: Sequence[LinkMessage]) -> None:
        self._released += [message.slot for message in messages if message.slot >= 0]

    def released(self) -> list[int]:
        released, self._released = self._released, []
        return released


class InlineTransport(Transport):
    """Sends payloads within any ordered stream of bytes; `name` is the network's."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._copier = load_copier()

    def offer(self, size: int) -> SendSide:
        return InlineSendSide(size, self._copier)

    def accept(self, offer: dict[str, Any], max_frame_bytes: int) -> ReceiveSide:
        return HostReceiveSide(self.name, self._copier)
