"""The interface of transports: one decides where the payloads of a link lie, and copies them there and away.

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
    """A place in the order of what a device is asked to do."""

    def query(self) -> bool:
        """True once all before it is done."""


class Unusable(Exception):
    """A transport cannot be used on this machine, or between these two; says why."""


@dataclass(frozen=True, slots=True)
class Slot:
    """`nbytes` at `offset` of a SendSide's memory: its taker's until it is queued or released."""

    offset: int
    nbytes: int


class SendSide(ABC):
    """The sender's memory of one link, `size` bytes for slots from `start` on. `open` if taken; `close` in the end.

    inline: payloads follow their headers on the stream. open_s: seconds that opening may take besides. busy: something
    is under way whose end only a call finds out. Where a checksum is not known at once, `gather` and `write` return a
    function that returns it later, and None before: the header goes out only then.
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
        """Asked by the thread that computes the rows: where a gather has to come behind what it has asked of a device
        so far, and then the link's thread gathers; None where rows are there already, and are gathered at once."""
        return None

    @abstractmethod
    def gather(self, rows: Rows, ids: NDArray[np.int64], slot: Slot, behind: Mark | None = None) -> Checksum:
        """Copies rows `ids`, one or more that exist, to the slot and returns the payload's checksum."""

    @abstractmethod
    def write(self, data: bytes, slot: Slot) -> Checksum:
        """Copies `data` to the slot and returns its checksum."""

    def open(self) -> bytes:
        """The receiver took this offer; returns what its side has to be `opened` with, or nothing."""
        return b""

    def body(self, slot: Slot) -> memoryview | None:
        """The bytes that follow the header on the stream, where payloads are inline."""
        return None

    def sent(self, messages: Sequence[LinkMessage]) -> None:
        """These have been written to the stream, in this order."""

    @abstractmethod
    def released(self) -> list[int]:
        """Offsets of slots that were read since this was last called. One thread at a time."""

    def carrier(self) -> str:
        """The network that it chose itself for payloads, where it has a choice."""
        return ""

    def check(self) -> None:
        """Now and then. Raises TransferError where the link cannot go on."""

    def close(self) -> None:
        """Idempotent: nobody can find this memory from now on."""


class ReceiveSide(ABC):
    """The receiver's half of one link. Called by the link's thread alone.

    A payload's header may come before the payload: the link then does other things until it has `arrived`.
    """

    name: str

    def opened(self, said: bytes) -> None:
        """The sender's side has opened and said this, ahead of every payload; not called where it says nothing."""

    def announced(self, message: LinkMessage) -> None:
        """This header has come, in order; its payload will be asked for or released."""

    def arrived(self, message: LinkMessage) -> bool:
        """True if its payload can be read now."""
        return True

    def check(self) -> None:
        """Now and then. Raises TransferError where the link cannot go on."""

    @abstractmethod
    def fault(self, message: LinkMessage) -> str:
        """Why this header announces no payload that can be read here; empty where it does."""

    @abstractmethod
    def scatter(self, message: LinkMessage, rows: Rows, ids: NDArray[np.int64]) -> int:
        """Copies the payload to rows `ids`. Returns the checksum of what was copied, not of what lies there now."""

    @abstractmethod
    def checksum(self, message: LinkMessage) -> int:
        """The payload's."""

    def release(self, messages: Iterable[LinkMessage]) -> None:
        """Their payloads have been read, or never will be."""

    def close(self) -> None:
        """Idempotent."""


class Transport(ABC):
    """One kind, as one worker has it; makes a side for each link. Raises Unusable where it cannot."""

    name: str

    @abstractmethod
    def offer(self, size: int) -> SendSide: ...

    @abstractmethod
    def accept(self, offer: dict[str, Any], max_frame_bytes: int) -> ReceiveSide:
        """max_frame_bytes: no payload is longer."""


class Missing(Transport):
    """One that this worker was asked to use and cannot."""

    def __init__(self, name: str, reason: str) -> None:
        self.name, self.reason = name, reason

    def offer(self, size: int) -> SendSide:
        raise Unusable(self.reason)

    def accept(self, offer: dict[str, Any], max_frame_bytes: int) -> ReceiveSide:
        raise Unusable(f"at the receiver: {self.reason}")


class ByteStream(Protocol):
    """Ordered bytes both ways. Never blocks in `send` or `recv_into`; one thread waits, any may wake it."""

    def send(self, parts: Iterable[Bytes]) -> int:
        """Bytes taken, 0 when there is no room now. Raises OSError when the peer is gone."""

    def recv_into(self, view: memoryview) -> int:
        """Bytes read, 0 when there are none now. Raises OSError when the peer is gone."""

    def wait(self, *, write: bool, timeout: float) -> None:
        """Until there is something to read, room to write if asked for, a wake, or `timeout` seconds have passed."""

    def wake(self) -> None: ...
    def close(self) -> None: ...


class Listener(Protocol):
    address: str

    def accept(self) -> ByteStream | None:
        """A new stream, if somebody has connected."""

    def wait(self, timeout: float) -> None:
        """Until somebody connects, or `timeout` seconds have passed."""

    def close(self) -> None: ...


class Network(Protocol):
    """A maker of streams."""

    def inline(self) -> Transport:
        """The transport whose payloads travel in these streams."""

    def listen(self, host: str, port: int) -> Listener: ...
    def dial(self, address: str, timeout: float) -> ByteStream:
        """Raises OSError."""
