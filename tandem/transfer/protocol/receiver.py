"""The receiving end of a link as a state machine: no socket, no thread, no clock; time comes in as `now`.

    link   HELLO -> WELCOME (open) | REFUSE
    frame  header checked (known transfer? its blocks? new ones?) -> Write: the owner copies and sums the payload
           -> written: the payload may be overwritten, and a wrong sum fails the transfer

Blocks cannot land in the wrong place, because only this side knows physical ids. Bytes with a wrong sum stay invisible,
because their transfer aborts. The sum is taken of the copied bytes, so it detects a payload overwritten too early.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tandem.liveness import Liveness
from tandem.transfer.protocol.coverage import Coverage
from tandem.transfer.protocol.endpoint import FrameShape, LocalPeer, TransferError
from tandem.transfer.protocol.landings import Landing, Landings
from tandem.transfer.protocol.wire import (
    NEAR,
    WHOLE,
    Begin,
    Failure,
    Fetch,
    Hello,
    Kind,
    LinkMessage,
    Welcome,
    check_proof,
    checksum,
    control,
    link_nonce,
    parse,
    proven,
    pulse_of,
    take_pulse,
)
from tandem.transfer.transports.base import ReceiveSide

HANDSHAKE_SECONDS = 5.0


@dataclass(slots=True)
class Write:
    """A payload to copy to `block_ids` of a layer's cache and to sum; a probe, without landing, is only summed."""

    message: LinkMessage
    landing: Landing | None
    block_ids: NDArray[np.int64]


class ReceiverProtocol:
    """The protocol of a link. `accept` chooses a transport for a HELLO and returns why better-liked ones do not work.

    `outbox`: messages to write to the peer. `read`: messages whose payloads have been read or never will be. `ended`:
    this link's transfers to report. `fetches`: the peer's requests for cached blocks.
    """

    def __init__(
        self, local: LocalPeer, landings: Landings, shape: FrameShape, *, nonce: int,
        accept: Callable[[Hello], tuple[ReceiveSide | None, dict[str, str]]], now: float,
    ) -> None:  # fmt: skip
        self.local, self.landings, self.shape = local.identity, landings, shape
        self.liveness = Liveness(now, local.vitals.starvation)
        self._secret, self._vitals, self._near = local.secret, local.vitals, local.near
        self.outbox: deque[LinkMessage] = deque()
        self.ended: deque[Landing] = deque()
        self.read: list[LinkMessage] = []
        self.fetches: deque[Fetch] = deque()
        self.hello: Hello | None = None
        self.side: ReceiveSide | None = None
        self._nonce = nonce
        self._accept = accept
        self._opened_at = now
        self._settles_at = math.inf  # when `Landings.settled` is due; inf: never
        self._bound: dict[int, Landing] = {}
        self._last_handle = 0

    @property
    def _sender(self) -> str:
        return self.hello.sender.incarnation if self.hello else ""

    @property
    def _side(self) -> ReceiveSide:
        if self.side is None:
            raise TransferError("FAILED_PRECONDITION", "a payload on a link that is not open")
        return self.side

    @property
    def peer(self) -> str:
        return str(self.hello.sender) if self.hello else "a peer that has not said HELLO"

    def receive(self, message: LinkMessage, now: float) -> Write | None:
        """Takes one message of the peer. The caller must carry out a returned Write: `start`, copy, `written`.

        Raises TransferError if the link cannot continue.
        """
        if self.hello is None:
            self._greet(message)
            self._settles_at = now
        elif message.nonce != self._nonce:
            self._fail_transfer(message, "FAILED_PRECONDITION", f"{message.kind.name} of another incarnation")
        elif message.kind in (Kind.FRAME, Kind.PROBE):
            return self._frame(message) if message.kind is Kind.FRAME else self._probe(message)
        elif checksum(message.body) == message.payload_sum:
            self._control(message, now)
        elif message.kind is Kind.COMMIT:
            self._fail_transfer(message, "DATA_LOSS", "a damaged COMMIT message")
        else:
            raise TransferError("DATA_LOSS", f"a damaged {message.kind.name} message")
        return None

    def start(self, write: Write) -> bool:
        """Marks a write as begun; call just before the copy. False: its transfer has ended, so do not copy."""
        landing = write.landing
        if landing and (landing.cancelled or landing.error):
            self.read.append(write.message)
            return False
        if landing:
            landing.writing = True
        return True

    def written(self, write: Write, seen_sum: int) -> None:
        """Ends a write: its payload was copied and its sum is `seen_sum`."""
        message, landing = write.message, write.landing
        self.read.append(message)
        if landing is None:
            self._send(Kind.PROBE_ACK, message.handle, seen_sum.to_bytes(8, "little"))
            return
        landing.writing = False
        if landing.cancelled:
            self.landings.settle(landing)
        elif landing.error:  # the transfer ended during the write; its owner may learn it only now
            self.landings.report(landing)
        elif seen_sum != message.payload_sum:
            self._fail_transfer(message, "DATA_LOSS", f"checksum of layer {message.layer}, block {message.first_block}")
        elif landing.coverage:
            landing.coverage.add(message.layer, message.first_block, message.num_blocks)
            landing.bytes_received += message.length

    def acknowledge(self, landing: Landing) -> None:
        self._send(Kind.ACK, landing.handle)

    def refuse(self, handle: int, error: TransferError) -> None:
        self._send(Kind.NACK, handle, Failure(code=error.code, message=error.message).packed())

    def release(self, landing: Landing, error: TransferError | None) -> None:
        """Unbinds an ended transfer: later frames of its handle are dropped. An error is sent to the peer."""
        if self._bound.pop(landing.handle, None) and error:
            self.refuse(landing.handle, error)

    def fail(self, error: TransferError) -> None:
        """Closes the lost link and ends every transfer bound to it with `error`."""
        for landing in list(self._bound.values()):
            self.landings.end(landing, error)
        if self.side:
            self.landings.lost(self._sender, self, error)
            self.side.close()
            self.side = None
        self.outbox.clear()

    def sent(self, messages: Sequence[LinkMessage]) -> None:
        if messages[-1].kind is Kind.REFUSE:
            raise TransferError("FAILED_PRECONDITION", "the link was refused")

    @property
    def num_bound(self) -> int:
        """The number of transfers under way on this link."""
        return len(self._bound)

    def tick(self, now: float) -> None:
        """Raises TransferError once the peer has been silent, or has not said HELLO, for too long.

        A sender uses one link at a time. Once it has opened another, silence here is no longer borne as a sole peer's.
        """
        if self.landings.num_links(self._sender) > 1:
            self.liveness.sole = False
        if self.liveness.lost(now) or (not self.side and now - self._opened_at > HANDSHAKE_SECONDS):
            raise TransferError("UNAVAILABLE", f"nothing heard from {self.peer} for {self.liveness.limit_s:.1f} s")
        if self.side and self.liveness.pings and now >= self._settles_at + self.liveness.usual_limit_s:
            self._settles_at = math.inf
            self.landings.settled(self._sender, self)
        if self.side and self.liveness.ping_due(now):
            self._send(Kind.PING, body=pulse_of(self._vitals, self.liveness.quiet_s))

    def _greet(self, message: LinkMessage) -> None:
        if message.kind is not Kind.HELLO or checksum(message.body) != message.payload_sum:
            raise TransferError("FAILED_PRECONDITION", "the peer did not begin with HELLO")
        hello = parse(Hello, message.body)
        try:
            check_proof(hello, self._secret)
        except TransferError as why:  # the peer did not prove its identity, so nothing of its HELLO is kept
            self.outbox.append(control(Kind.REFUSE, Failure(code=why.code, message=why.message).packed()))
            return
        self.hello = hello
        fault, refused = self._mismatch(hello), dict[str, str]()
        if not fault:
            self.side, refused = self._accept(hello)
        if self.side is None:
            reasons = "; ".join(f"{name}: {why}" for name, why in refused.items())
            fault = fault or f"transports: none in common ({reasons}); let both use one, such as tcp"
            refusal = Failure(code="FAILED_PRECONDITION", message=fault)
            self.outbox.append(control(Kind.REFUSE, refusal.packed()))
            return
        self.landings.linked(hello.sender.incarnation, self)
        welcome = Welcome(
            receiver=self.local, nonce=self._nonce, transport=self.side.name, refused=refused,
            num_layers=self.shape.num_layers, block_bytes=self.shape.block_bytes,
            max_frame_bytes=self.shape.max_frame_bytes,
        )  # fmt: skip
        self.outbox.append(control(Kind.WELCOME, proven(welcome, self._secret, hello.proof).packed()))
        self._nonce = link_nonce(hello.sender, self.local, hello.nonce, self._nonce)

    def _mismatch(self, hello: Hello) -> str:
        asked, local = hello.receiver, self.local
        if (asked.worker_id, asked.incarnation) != (local.worker_id, local.incarnation):
            return f"incarnation: {asked} was asked for, {local} answers here"
        if hello.sender.layout_hash != local.layout_hash:
            return f"layout_hash: {hello.sender} has {hello.sender.layout_hash}, {local} has {local.layout_hash}"
        return ""

    def _control(self, message: LinkMessage, now: float) -> None:
        landing = self._bound.get(message.handle)
        match message.kind:
            case Kind.PING:
                take_pulse(message, self.liveness, now)
                self._send(Kind.PONG)
            case Kind.OPEN:
                self._side.opened(bytes(message.body))
            case Kind.BEGIN:
                self._begin(message)
            case Kind.FETCH:
                self.fetches.append(parse(Fetch, message.body))
            case Kind.COMMIT if landing:
                self._commit(landing, bytes(message.body), now)
            case Kind.COMMIT:
                self.refuse(message.handle, TransferError("FAILED_PRECONDITION", "COMMIT of an unknown transfer"))
            case Kind.ABORT if landing:
                self.landings.end(landing, parse(Failure, message.body).error())

    def _begin(self, message: LinkMessage) -> None:
        begin, handle = parse(Begin, message.body), message.handle
        if bound := self._bound.get(handle):
            self.landings.end(bound, TransferError("FAILED_PRECONDITION", f"{bound.transfer_id}: BEGIN came twice"))
            return
        self._last_handle = max(self._last_handle, handle)
        landing = self.landings.live.get(begin.transfer_id)
        if landing is None or landing.link is not None or landing.sender not in ("", self._sender):
            text = f"{begin.transfer_id}: not expected here of {self.peer}, or begun already"
            self.refuse(handle, TransferError("FAILED_PRECONDITION", text))
            return
        landing.link, landing.handle = self, handle
        self._bound[handle] = landing
        num_blocks = len(landing.block_ids) - landing.first_block
        if landing.may_be_less:
            num_blocks = min(begin.num_blocks, num_blocks)
        expected = (landing.first_block, num_blocks, self.shape.num_layers)
        landing.coverage = Coverage(*expected, self._near)
        if (begin.first_block, begin.num_blocks, begin.num_layers) != expected:
            have = f"first_block {begin.first_block}, num_blocks {begin.num_blocks}, num_layers {begin.num_layers}"
            text = f"{begin.transfer_id}: BEGIN says {have}; {expected} were expected"
            self.landings.end(landing, TransferError("FAILED_PRECONDITION", text))

    def _frame(self, message: LinkMessage) -> Write | None:
        landing = self._bound.get(message.handle)
        if landing is None or landing.coverage is None:
            self.read.append(message)
            if message.handle > self._last_handle:
                self.refuse(message.handle, TransferError("FAILED_PRECONDITION", "FRAME of an unknown transfer"))
            return None
        first, end = message.first_block, message.first_block + message.num_blocks
        is_near = message.layer in self._near.layers
        wanted = NEAR if is_near else WHOLE
        fault = (
            f"{message.extent}: whole layers are taken here, of group {wanted.group}"
            if message.extent != wanted
            else ""
        )
        fault = fault or landing.coverage.fault(message.layer, first, message.num_blocks) or self._side.fault(message)
        if not fault and message.length != message.num_blocks * self.shape.block_bytes:
            fault = f"{message.length} bytes for {message.num_blocks} blocks of {self.shape.block_bytes}"
        if fault:
            self.read.append(message)
            self._fail_transfer(message, "FAILED_PRECONDITION", fault)
            return None
        return Write(message, landing, (landing.places if is_near else landing.block_ids)[first:end])

    def _probe(self, message: LinkMessage) -> Write:
        if fault := self._side.fault(message):
            raise TransferError("FAILED_PRECONDITION", f"PROBE: {fault}")
        return Write(message, None, np.empty(0, np.int64))

    def _commit(self, landing: Landing, payload: bytes, now: float) -> None:
        missing = landing.coverage.missing if landing.coverage else 0
        if now >= landing.deadline:
            self.landings.tick(now)
        elif missing:
            text = f"{landing.transfer_id}: COMMIT with {missing} (layer, block) pairs missing"
            self.landings.end(landing, TransferError("DATA_LOSS", text))
        else:
            self.landings.commit(landing, payload)

    def _fail_transfer(self, message: LinkMessage, code: str, why: str) -> None:
        """Ends the transfer that a bad message names, and no other one."""
        if landing := self._bound.get(message.handle):
            self.landings.end(landing, TransferError(code, f"{landing.transfer_id}: {why}"))

    def _send(self, kind: Kind, handle: int = 0, body: bytes = b"") -> None:
        message = control(kind, body)
        message.nonce, message.handle = self._nonce, handle
        self.outbox.append(message)
