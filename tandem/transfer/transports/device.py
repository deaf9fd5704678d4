"""Payloads in a GPU's memory: the common parts of its transports. A small interface hides the device from tests.

sender     gather and sum on the link's own stream, after a mark on the stream that computes the KV: no thread waits,
           and the engine keeps the blocks until they have been read
receiver   payload -> staging memory, summed there -> rows, only if the sum is right
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from tandem.transfer.copy.device_sum import MASK, DeviceSum
from tandem.transfer.copy.rows import Rows
from tandem.transfer.protocol.wire import Checksum, LinkMessage
from tandem.transfer.transports.base import Mark, ReceiveSide, SendSide, Slot, Unusable

WORD = 8


class Queue(Protocol):
    """A stream of the device, which does queued work in order."""

    pointer: int

    def use(self) -> AbstractContextManager[object]:
        """Returns a context in which this thread's torch work goes to this queue and its device."""

    def record(self) -> Mark: ...
    def follow(self, mark: Mark) -> None:
        """Makes later work of this queue wait, on the device, for all work before `mark`."""


class Device(Protocol):
    place: torch.device

    def queue(self) -> Queue: ...
    def mark(self) -> Mark:
        """Returns a mark after all work that this thread has queued on the device with torch."""

    def identity(self) -> str:
        """Returns a name of the device that is unique among all hosts."""

    def view(self, pointer: int, size: int) -> torch.Tensor:
        """Views device memory that torch has not allocated as int64 words."""

    def upload(self, words: torch.Tensor) -> torch.Tensor:
        """Copies int64 words from the host to the device without waiting for the device."""

    def fetch(self, number: torch.Tensor) -> Callable[[], int | None]:
        """Begins to copy one int64 to the host and returns a function that returns it once copied, None before."""


class CudaQueue:
    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.pointer: int = self._stream.cuda_stream

    def use(self) -> AbstractContextManager[object]:
        context: AbstractContextManager[object] = torch.cuda.stream(self._stream)
        return context

    def record(self) -> Mark:
        mark: Mark = self._stream.record_event()
        return mark

    def follow(self, mark: Mark) -> None:
        self._stream.wait_event(mark)  # type: ignore[arg-type]


class _Memory:
    """Device memory with the interface by which CUDA libraries see each other's memory."""

    def __init__(self, pointer: int, count: int) -> None:
        self.__cuda_array_interface__ = {"shape": (count,), "typestr": "<i8", "data": (pointer, False), "version": 3}


class CudaDevice:
    """The current CUDA device of this process. Raises Unusable if there is none."""

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise Unusable("no CUDA device: torch.cuda.is_available() is false")
        self.place = torch.device("cuda", torch.cuda.current_device())

    def queue(self) -> Queue:
        return CudaQueue(self.place)

    def mark(self) -> Mark:
        mark: Mark = torch.cuda.current_stream(self.place).record_event()
        return mark

    def identity(self) -> str:
        return str(torch.cuda.get_device_properties(self.place).uuid)

    def view(self, pointer: int, size: int) -> torch.Tensor:
        return torch.as_tensor(_Memory(pointer, size // WORD), device=self.place)

    def upload(self, words: torch.Tensor) -> torch.Tensor:
        return words.pin_memory().to(self.place, non_blocking=True)

    def fetch(self, number: torch.Tensor) -> Callable[[], int | None]:
        there = torch.empty((), dtype=torch.int64, pin_memory=True)
        there.copy_(number, non_blocking=True)
        event = torch.cuda.current_stream(self.place).record_event()
        return lambda: int(there) & MASK if event.query() else None


class DeviceSendSide(SendSide):
    """A sender's slots in device memory, which `allocate` makes as int64 words."""

    def __init__(self, size: int, device: Device) -> None:
        super().__init__(size // WORD * WORD)
        self._device, self._queue = device, device.queue()
        self._sum = DeviceSum(device.place)
        self._memory: torch.Tensor | None = None

    def allocate(self) -> torch.Tensor:
        return torch.zeros(self.size // WORD, dtype=torch.int64, device=self._device.place)

    def open(self) -> bytes:
        with self._queue.use():
            self._memory = self.allocate()
        return b""

    def words(self, slot: Slot) -> torch.Tensor:
        assert self._memory is not None
        return self._memory[slot.offset // WORD : -(-(slot.offset + slot.nbytes) // WORD)]

    def mark(self) -> Mark:
        return self._device.mark()

    def gather(self, rows: Rows, ids: NDArray[np.int64], slot: Slot, behind: Mark | None = None) -> Checksum:
        with self._queue.use():
            words = self.words(slot).view(len(ids), -1)
            places = self._device.upload(torch.from_numpy(ids))
            if behind is not None:
                self._queue.follow(behind)
            torch.index_select(rows.words(), 0, places, out=words)
            return self._device.fetch(self._sum(words))

    def write(self, data: bytes, slot: Slot) -> Checksum:
        with self._queue.use():
            words = self.words(slot)
            padded = bytearray(data.ljust(len(words) * WORD, b"\0"))
            words.copy_(self._device.upload(torch.frombuffer(padded, dtype=torch.int64)))
            return self._device.fetch(self._sum(words))


class DeviceReceiveSide(ReceiveSide):
    """Copies payloads from staging memory (`payload`), which nothing else writes, so the summed bytes are copied."""

    def __init__(self, name: str, device: Device) -> None:
        self.name, self._device = name, device
        self._queue = device.queue()
        self._sum = DeviceSum(device.place)

    @abstractmethod
    def payload(self, message: LinkMessage) -> torch.Tensor:
        """Returns the payload in staging memory as int64 words, padded with zeros after its last byte."""

    def scatter(self, message: LinkMessage, rows: Rows, ids: NDArray[np.int64]) -> int:
        with self._queue.use():
            words = self.payload(message)
            seen = int(self._sum(words)) & MASK
            if seen == message.payload_sum:
                rows.words().index_copy_(0, torch.from_numpy(ids).to(self._device.place), words.view(len(ids), -1))
                int(words[0])  # wait: the copy must be done before it is reported
        return seen

    def checksum(self, message: LinkMessage) -> int:
        with self._queue.use():
            return int(self._sum(self.payload(message))) & MASK
