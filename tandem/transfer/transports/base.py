"""The interface of transports. A transport defines where a link's payloads lie, and copies them there and away.

    sender     Transport.offer -> SendSide: memory to gather into; its `offer` goes to the receiver with HELLO
    receiver   Transport.accept(offer) -> ReceiveSide: finds each payload that a header announces
    both       the first of the sender's offers that the receiver accepts is the link's transport

A payload either follows its header on the stream (`inline`) or lies at the header's `offset`. The stream itself, with
every header and control message, comes from a Network.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tandem.transfer.copy.rows import Rows
from tandem.transfer.protocol.wire import Bytes, Checksum, LinkMessage


class Mark(Protocol):
    """A place in the order of a device's work, such as a CUDA event."""

    def query(self) -> bool:
        """True once the device has done all work before the mark."""


class Unusable(Exception):
    """A transport cannot be used on this machine, or between these two workers; the message is the reason."""


@dataclass(frozen=True, slots=True)
class Slot:
    """A piece of a SendSide's memory, `nbytes` at `offset`, which belongs to its taker until queued or released."""

    offset: int
    nbytes: int


class SendSide(ABC):
    """The sender's memory of one link: `size` bytes for slots from `start` on. The link calls `open` if the receiver
    takes the offer, and `close` at its end.

    inline: payloads follow their headers on the stream. open_s: additional seconds that opening may take. busy: work is
    under way whose end only a call finds out. If a checksum is not known immediately, `gather` and `write` return a
    function that returns the checksum later, and None before; the header is sent only then.
    """

    inline = False
    open_s = 0.0
    busy = False
    start = 0
    offer: dict[str, Any]

    def __init__(self, size: int) -> None:
        self.size = size
        self.offer = {}

    def mark(self) -> Mark | None:
        """Returns a mark after all device work that this thread, which computes the rows, has queued: the link's thread
        gathers later, after the mark. None if rows are complete, so that this thread gathers immediately."""
        return None

    @abstractmethod
    def gather(self, rows: Rows, ids: NDArray[np.int64], slot: Slot, behind: Mark | None = None) -> Checksum:
        """Copies the existing rows `ids`, at least one, to the slot and returns the payload's checksum."""

    @abstractmethod
    def write(self, data: bytes, slot: Slot) -> Checksum:
        """Copies `data` to the slot and returns its checksum."""

    def open(self) -> bytes:
        """Opens this side, whose offer the receiver took. Returns a message for the receiver's `opened`, or b""."""
        return b""

    def body(self, slot: Slot) -> memoryview | None:
        """Returns the bytes that follow the header on the stream, if payloads are inline, else None."""
        return None

    def sent(self, messages: Sequence[LinkMessage]) -> None:
        """Learns that these messages have been written to the stream, in this order."""

    @abstractmethod
    def released(self) -> list[int]:
        """Returns the offsets of slots that were read since the last call. Only one thread at a time calls this."""

    def carrier(self) -> str:
        """Returns the network that the transport itself chose for payloads; empty if it has no choice."""
        return ""

    def check(self) -> None:
        """Now and then. Raises TransferError where the link cannot go on."""

    def close(self) -> None:
        """Makes this memory unreachable for other processes from now on. Idempotent."""


class ReceiveSide(ABC):
    """The receiver's half of one link. Only the link's thread calls it.

    A header may come before its payload: the link then does other work until the payload has `arrived`.
    """

    name: str

    def opened(self, said: bytes) -> None:
        """Takes the message that the sender's `open` returned, before any payload; not called if that was empty."""

    def announced(self, message: LinkMessage) -> None:
        """Takes a header, in order of arrival; the link will later read the header's payload or release it."""

    def arrived(self, message: LinkMessage) -> bool:
        """True if the message's payload can be read now."""
        return True

    def check(self) -> None:
        """Now and then. Raises TransferError where the link cannot go on."""

    @abstractmethod
    def fault(self, message: LinkMessage) -> str:
        """Returns why the header's payload cannot be read here; empty if it can."""

    @abstractmethod
    def scatter(self, message: LinkMessage, rows: Rows, ids: NDArray[np.int64]) -> int:
        """Copies the payload to rows `ids`.

        Returns the checksum of the copied bytes, even if the payload has changed since.
        """

    @abstractmethod
    def checksum(self, message: LinkMessage) -> int:
        """Returns the checksum of the message's payload."""

    def release(self, messages: Iterable[LinkMessage]) -> None:
        """Releases the payloads of messages, which have been read or never will be."""

    def close(self) -> None:
        """Frees this side. Idempotent."""


class Transport(ABC):
    """A worker's transport of one kind. It makes a side for each link; raises Unusable if it cannot."""

    name: str

    @abstractmethod
    def offer(self, size: int) -> SendSide: ...

    @abstractmethod
    def accept(self, offer: dict[str, Any], max_frame_bytes: int) -> ReceiveSide:
        """Makes the receiving side for a sender's offer. max_frame_bytes: the longest payload. Raises Unusable."""


class Missing(Transport):
    """A transport that this worker was told to use and cannot; every call raises Unusable with the reason."""

    def __init__(self, name: str, reason: str) -> None:
        self.name, self.reason = name, reason

    def offer(self, size: int) -> SendSide:
        raise Unusable(self.reason)

    def accept(self, offer: dict[str, Any], max_frame_bytes: int) -> ReceiveSide:
        raise Unusable(f"at the receiver: {self.reason}")


class ByteStream(Protocol):
    """Ordered bytes in both directions.

    `send` and `recv_into` never block; one thread waits, any thread may wake it.
    """

    def send(self, parts: Iterable[Bytes]) -> int:
        """Sends bytes and returns how many were taken, 0 if there is no room now.

        Raises OSError if the peer is gone.
        """

    def recv_into(self, view: memoryview) -> int:
        """Reads bytes and returns how many came, 0 if there are none now. Raises OSError if the peer is gone."""

    def wait(self, *, write: bool, timeout: float) -> None:
        """Waits for something to read, for room if `write`, for a `wake`, at most `timeout` seconds."""

    def wake(self) -> None: ...
    def close(self) -> None: ...


class Listener(Protocol):
    address: str

    def accept(self) -> ByteStream | None:
        """Returns a new stream if a peer has connected, else None."""

    def wait(self, timeout: float) -> None:
        """Waits until a peer connects, at most `timeout` seconds."""

    def close(self) -> None: ...


class Network(Protocol):
    """A maker of streams."""

    def inline(self) -> Transport:
        """Returns the transport whose payloads travel in these streams."""

    def listen(self, host: str, port: int) -> Listener: ...
    def dial(self, address: str, timeout: float) -> ByteStream:
        """Connects to `address`. Raises OSError."""
