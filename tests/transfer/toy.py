"""A transport as docs/extending.md describes one: payloads lie in buffers that both ends find by a number."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import count
from typing import Any

from tandem.transfer.copy.copier import Copier
from tandem.transfer.protocol.wire import LinkMessage
from tandem.transfer.transports.base import ReceiveSide, SendSide, Transport, Unusable
from tandem.transfer.transports.host import HostReceiveSide, HostSendSide

buffers: dict[int, ToySendSide] = {}
numbers = count()


class ToySendSide(HostSendSide):
    def __init__(self, size: int, copier: Copier) -> None:
        super().__init__(size, copier)
        self.view = memoryview(bytearray(size))
        self.read: deque[int] = deque()
        self._number = next(numbers)
        buffers[self._number] = self
        self.offer = {"number": self._number}

    def released(self) -> list[int]:
        return [self.read.popleft() for _ in range(len(self.read))]

    def close(self) -> None:
        buffers.pop(self._number, None)


class ToyReceiveSide(HostReceiveSide):
    def __init__(self, sender: ToySendSide, copier: Copier) -> None:
        super().__init__("toy", copier)
        self._sender = sender

    def payload(self, message: LinkMessage) -> memoryview:
        return self._sender.view[message.offset : message.offset + message.length]

    def fault(self, message: LinkMessage) -> str:
        return "" if message.offset + message.length <= self._sender.size else "outside the buffer"

    def release(self, messages: Iterable[LinkMessage]) -> None:
        self._sender.read.extend(message.offset for message in messages)


class ToyTransport(Transport):
    name = "toy"

    def offer(self, size: int) -> SendSide:
        return ToySendSide(size, Copier())

    def accept(self, offer: dict[str, Any], max_frame_bytes: int) -> ReceiveSide:
        try:
            return ToyReceiveSide(buffers[offer["number"]], Copier())
        except KeyError:
            raise Unusable("the sender is in another process") from None
