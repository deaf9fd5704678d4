"""The receiving end of a link as a state machine: no socket, no thread, no clock; time comes in as `now`.

    link   HELLO -> WELCOME (open) | REFUSE
    frame  header checked (whose? which blocks? seen before?) -> Landing: the owner copies it to the cache and sums it
           -> landed: the slot may be written again, and the sum decides

Blocks in the wrong place are impossible, for only this side knows physical ids; bytes that fail their sum stay
invisible, for their transfer aborts. The sum is taken after the copy, so a sender that scribbles over its arena between
the two is found out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tandem.transfer.protocol.coverage import Coverage
from tandem.transfer.protocol.endpoint import Endpoint, TransferError
from tandem.transfer.protocol.landings import Inbound, InboundTable
from tandem.transfer.protocol.liveness import Liveness
from tandem.transfer.protocol.wire import (
    INLINE,
    Begin,
    Failure,
    Hello,
    Kind,
    Message,
    Welcome,
    checksum,
    control,
    link_nonce,
    parse,
)

HANDSHAKE_SECONDS = 5.0


@dataclass(slots=True)
class Landing:
    """A payload to copy to `block_ids` of a layer's cache and then to sum; a probe (no transfer) only to sum."""

    message: Message
    inbound: Inbound | None
    block_ids: NDArray[np.int64]


class ReceiverProtocol:
    """One link. `choose` picks the transport for a HELLO ("" for none).

    `outbox` holds what to write to the peer; `read`, the arena slots that its owner is to give back to the sender.
    """

    def __init__(
        self, local: Endpoint, table: InboundTable, *, num_layers: int, block_bytes: int, max_frame_bytes: int,
        nonce: int, choose: Callable[[Hello], str], now: float,
    ) -> None:  # fmt: skip
        self.local, self.table, self.block_bytes, self.max_frame_bytes = local, table, block_bytes, max_frame_bytes
        self.num_layers = num_layers
        self.liveness = Liveness(now, now)
        self.outbox: deque[Message] = deque()
        self.endings: deque[Inbound] = deque()
        self.read: list[int] = []
        self.hello: Hello | None = None
        self.transport = ""
        self._nonce = nonce
        self._choose = choose
        self._opened_at = now
        self._bound: dict[int, Inbound] = {}
        self._last_handle = 0

    @property
    def _sender(self) -> str:
        return self.hello.sender.incarnation if self.hello else ""

    @property
    def peer(self) -> str:
        return str(self.hello.sender) if self.hello else "a peer that has not said HELLO"

    def receive(self, message: Message, now: float) -> Landing | None:
        """Takes one message of the peer; a Landing must be carried out and reported as `landed`.

        Raises TransferError where the link cannot go on.
        """
        if self.hello is None:
            self._greet(message)
        elif message.nonce != self._nonce:
            self._spoil(message, "FAILED_PRECONDITION", f"{message.kind.name} of another incarnation")
        elif message.kind in (Kind.FRAME, Kind.PROBE):
            return self._frame(message) if message.kind is Kind.FRAME else self._probe(message)
        elif checksum(message.body) == message.payload_sum:
            self._heed(message, now)
        elif message.kind is Kind.COMMIT:
            self._spoil(message, "DATA_LOSS", "a damaged COMMIT message")
        else:
            raise TransferError("DATA_LOSS", f"a damaged {message.kind.name} message")
        return None

    def landed(self, landing: Landing, seen_sum: int) -> None:
        """The copy is done and the payload summed to `seen_sum`."""
        message, inbound = landing.message, landing.inbound
        self._give_back(message)
        if inbound is None:
            self._send(Kind.PROBE_ACK, message.handle, seen_sum.to_bytes(8, "little"))
            return
        inbound.landing = False
        if inbound.error and not inbound.cancelled:  # it ended meanwhile, and only now may its owner know
            self.table.announce(inbound)
        elif not inbound.cancelled and seen_sum != message.payload_sum:
            self._spoil(message, "DATA_LOSS", f"checksum of layer {message.layer}, block {message.first_block}")
        elif inbound.coverage and not inbound.cancelled:
            inbound.coverage.add(message.layer, message.first_block, message.num_blocks)
            inbound.bytes_received += message.length

    def acknowledge(self, inbound: Inbound) -> None:
        self._send(Kind.ACK, inbound.handle)

    def refuse(self, handle: int, error: TransferError) -> None:
        self._send(Kind.NACK, handle, Failure(code=error.code, message=error.message).packed())

    def release(self, inbound: Inbound, error: TransferError | None) -> None:
        """The transfer has ended: later frames of its handle are dropped."""
        if self._bound.pop(inbound.handle, None) and error:
            self.refuse(inbound.handle, error)

    def fail(self, error: TransferError) -> None:
        """The link is gone, and with it every transfer bound to it."""
        for inbound in list(self._bound.values()):
            self.table.end(inbound, error)
        if self.transport:
            self.table.lost(self._sender, error)
            self.transport = ""
        self.outbox.clear()

    def sent(self, messages: Sequence[Message], now: float) -> None:
        self.liveness.sent_at = now
        if messages[-1].kind is Kind.REFUSE:
            raise TransferError("FAILED_PRECONDITION", "the link was refused")

    def tick(self, now: float) -> None:
        """Raises TransferError once the peer has been silent, or has not said HELLO, for too long."""
        if self.liveness.lost(now) or (not self.transport and now - self._opened_at > HANDSHAKE_SECONDS):
            raise TransferError("UNAVAILABLE", f"nothing heard from {self.peer} for {self.liveness.limit} s")
        if self.transport and self.liveness.ping_due(now):
            self.liveness.sent_at = now
            self._send(Kind.PING)

    def _greet(self, message: Message) -> None:
        if message.kind is not Kind.HELLO or checksum(message.body) != message.payload_sum:
            raise TransferError("FAILED_PRECONDITION", "the peer did not begin with HELLO")
        self.hello = hello = parse(Hello, message.body)
        fault = self._mismatch(hello)
        if not fault:
            self.transport = self._choose(hello)
            fault = "" if self.transport else f"transport: none of {hello.transports} will do here"
        if fault:
            refusal = Failure(code="FAILED_PRECONDITION", message=fault)
            self.outbox.append(control(Kind.REFUSE, refusal.packed()))
            return
        welcome = Welcome(
            receiver=self.local, nonce=self._nonce, transport=self.transport, num_layers=self.num_layers,
            block_bytes=self.block_bytes, max_frame_bytes=self.max_frame_bytes,
        )  # fmt: skip
        self.outbox.append(control(Kind.WELCOME, welcome.packed()))
        self.table.linked(hello.sender.incarnation)
        self._nonce = link_nonce(hello.sender, self.local, hello.nonce, self._nonce)

    def _mismatch(self, hello: Hello) -> str:
        asked, local = hello.receiver, self.local
        if (asked.worker_id, asked.incarnation) != (local.worker_id, local.incarnation):
            return f"incarnation: {asked} was asked for, {local} answers here"
        if hello.sender.layout_hash != local.layout_hash:
            return f"layout_hash: {hello.sender} has {hello.sender.layout_hash}, {local} has {local.layout_hash}"
        return ""

    def _heed(self, message: Message, now: float) -> None:
        inbound = self._bound.get(message.handle)
        match message.kind:
            case Kind.PING:
                self._send(Kind.PONG)
            case Kind.BEGIN:
                self._begin(message)
            case Kind.COMMIT if inbound:
                self._commit(inbound, bytes(message.body), now)
            case Kind.COMMIT:
                self.refuse(message.handle, TransferError("FAILED_PRECONDITION", "COMMIT of an unknown transfer"))
            case Kind.ABORT if inbound:
                self.table.end(inbound, parse(Failure, message.body).error())

    def _begin(self, message: Message) -> None:
        begin, handle = parse(Begin, message.body), message.handle
        if bound := self._bound.get(handle):
            self.table.end(bound, TransferError("FAILED_PRECONDITION", f"{bound.transfer_id}: BEGIN came twice"))
            return
        self._last_handle = max(self._last_handle, handle)
        inbound = self.table.live.get(begin.transfer_id)
        if inbound is None or inbound.link is not None or inbound.sender not in ("", self._sender):
            text = f"{begin.transfer_id}: not expected here of {self.peer}, or begun already"
            self.refuse(handle, TransferError("FAILED_PRECONDITION", text))
            return
        inbound.link, inbound.handle = self, handle
        self._bound[handle] = inbound
        expected = (inbound.first_block, len(inbound.block_ids) - inbound.first_block, self.num_layers)
        inbound.coverage = Coverage(*expected)
        if (begin.first_block, begin.num_blocks, begin.num_layers) != expected:
            have = f"first_block {begin.first_block}, num_blocks {begin.num_blocks}, num_layers {begin.num_layers}"
            text = f"{begin.transfer_id}: BEGIN says {have}; {expected} were expected"
            self.table.end(inbound, TransferError("FAILED_PRECONDITION", text))

    def _frame(self, message: Message) -> Landing | None:
        inbound = self._bound.get(message.handle)
        if inbound is None or inbound.coverage is None:
            self._give_back(message)
            if message.handle > self._last_handle:
                self.refuse(message.handle, TransferError("FAILED_PRECONDITION", "FRAME of an unknown transfer"))
            return None
        first, end = message.first_block, message.first_block + message.num_blocks
        fault = inbound.coverage.fault(message.layer, first, message.num_blocks) or self._misplaced(message)
        if not fault and message.length != message.num_blocks * self.block_bytes:
            fault = f"{message.length} bytes for {message.num_blocks} blocks of {self.block_bytes}"
        if fault:
            self._give_back(message)
            self._spoil(message, "FAILED_PRECONDITION", fault)
            return None
        inbound.landing = True
        return Landing(message, inbound, inbound.block_ids[first:end])

    def _probe(self, message: Message) -> Landing:
        if fault := self._misplaced(message):
            raise TransferError("FAILED_PRECONDITION", f"PROBE: {fault}")
        return Landing(message, None, np.empty(0, np.int64))

    def _misplaced(self, message: Message) -> str:
        size = self.hello.shm.size if self.hello and self.hello.shm and self.transport == "shm" else 0
        if (message.offset == INLINE) == (size == 0) and (not size or message.offset + message.length <= size):
            return ""
        return f"offset {message.offset}, {message.length} bytes: not in this link's arena of {size} bytes"

    def _commit(self, inbound: Inbound, payload: bytes, now: float) -> None:
        missing = inbound.coverage.missing if inbound.coverage else 0
        if now >= inbound.deadline:
            self.table.tick(now)
        elif missing:
            text = f"{inbound.transfer_id}: COMMIT with {missing} (layer, block) pairs missing"
            self.table.end(inbound, TransferError("DATA_LOSS", text))
        else:
            self.table.commit(inbound, payload)

    def _spoil(self, message: Message, code: str, why: str) -> None:
        """A bad message costs the transfer that it names, and no other."""
        if inbound := self._bound.get(message.handle):
            self.table.end(inbound, TransferError(code, f"{inbound.transfer_id}: {why}"))

    def _give_back(self, message: Message) -> None:
        if message.offset != INLINE:
            self.read.append(message.offset)

    def _send(self, kind: Kind, handle: int = 0, body: bytes = b"") -> None:
        self.outbox.append(control(kind, body, nonce=self._nonce, handle=handle))
