"""The sending end of a link as a state machine: no socket, no thread, no clock; time comes in as `now`.

    link      HELLO -> WELCOME (open) | REFUSE (failed)
    transfer  begin: BEGIN -> PUSHING --accept, frame: FRAME*--> commit: COMMITTING, COMMIT after FRAMEs -> ACK: DONE
              at any time: abort or deadline (ABORT goes out), NACK or loss of the link -> FAILED

The owner writes the messages of `outbox` to the peer; after every call it takes `credits` (slots that may be filled
again) and `ended` (transfers whose outcome is known).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from tandem.liveness import Liveness
from tandem.transfer.protocol.coverage import Coverage
from tandem.transfer.protocol.endpoint import LinkPeer, LocalPeer, TransferError
from tandem.transfer.protocol.wire import (
    INLINE,
    NEAR,
    WHOLE,
    Begin,
    Bytes,
    Checksum,
    Failure,
    Fetch,
    Hello,
    Kind,
    KVSource,
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

# Seconds after its deadline within which a push must have ended.
LATE_S = 1.0


class PushState(Enum):
    PUSHING = auto()
    COMMITTING = auto()
    DONE = auto()
    FAILED = auto()


@dataclass(eq=False, slots=True)
class Outgoing:
    """An outgoing transfer. `error` is why it FAILED.

    to_frame: the number of accepted frames without a payload. gathering: frames that a device may still be filling.
    """

    handle: int
    transfer_id: str
    deadline: float
    coverage: Coverage
    source: KVSource = KVSource.COMPUTE
    state: PushState = PushState.PUSHING
    error: TransferError | None = None
    bytes_sent: int = 0
    to_frame: int = 0
    gathering: deque[LinkMessage] = field(default_factory=deque)
    committed: bytes | None = None

    @property
    def reading(self) -> bool:
        """True while accepted blocks may still be read; False once the transfer has ended. Only for one thread."""
        if self.state in (PushState.DONE, PushState.FAILED):
            return False
        while self.gathering and self.gathering[0].ready:
            self.gathering.popleft()
        return bool(self.to_frame or self.gathering)  # read in this order: `frame` changes `gathering` first


@dataclass(frozen=True, slots=True)
class Payload:
    """The contents of a slot. body: the bytes, if they follow their header on the stream, else None."""

    slot: int
    length: int
    checksum: Checksum
    body: memoryview | None


class SenderProtocol:
    def __init__(
        self, local: LocalPeer, remote: LinkPeer, *, nonce: int, offers: dict[str, dict[str, Any]], now: float
    ) -> None:
        self.remote = remote
        self._local = local
        self.liveness = Liveness(now, local.vitals.starvation)
        self.hello = proven(Hello(sender=local.identity, receiver=remote, nonce=nonce, offers=offers), local.secret)
        self.outbox: deque[LinkMessage] = deque([control(Kind.HELLO, self.hello.packed())])
        self.welcome: Welcome | None = None
        self.error: TransferError | None = None
        self.ended: list[Outgoing] = []
        self.credits: list[int] = []
        self.probed: dict[int, bool] = {}
        self._nonce = 0
        self._handles = 0
        self._live: dict[int, Outgoing] = {}
        self._probes: dict[int, LinkMessage] = {}
        self._lent: set[int] = set()

    def begin(
        self, transfer_id: str, *, first_block: int, num_blocks: int, num_layers: int, deadline: float,
        source: KVSource = KVSource.COMPUTE,
    ) -> Outgoing:  # fmt: skip
        """Opens a transfer of blocks [first_block, first_block + num_blocks) of every layer. Raises TransferError."""
        welcome = self.opened()
        if num_layers != welcome.num_layers or first_block < 0 or num_blocks < 0:
            have = f"num_layers {num_layers}, first_block {first_block}, num_blocks {num_blocks}"
            raise TransferError("FAILED_PRECONDITION", f"begin: {have}; the receiver has {welcome.num_layers} layers")
        coverage = Coverage(first_block, num_blocks, num_layers, self._local.near)
        outgoing = Outgoing(self._next_handle(), transfer_id, deadline, coverage, source)
        self._live[outgoing.handle] = outgoing
        body = Begin(
            transfer_id=transfer_id, first_block=first_block, num_blocks=num_blocks, num_layers=num_layers
        ).packed()
        self._send(Kind.BEGIN, outgoing.handle, body)
        return outgoing

    def tell(self, said: bytes) -> None:
        """Queues a message of this side's transport to the receiver's transport."""
        self._send(Kind.OPEN, 0, said)

    def check(self, outgoing: Outgoing, layer: int, first_block: int, num_blocks: int) -> None:
        """Raises TransferError unless these blocks may be pushed now; a wrong push also fails the transfer."""
        self._pushing(outgoing)
        if fault := outgoing.coverage.fault(layer, first_block, num_blocks):
            self.abort(outgoing, TransferError("FAILED_PRECONDITION", f"{outgoing.transfer_id}: {fault}"))
            self._pushing(outgoing)

    def accept(self, outgoing: Outgoing, layer: int, first_block: int, num_blocks: int) -> None:
        """Accepts blocks as the transfer's next frame, whose payload follows with `frame`. Raises as `check` does."""
        self.check(outgoing, layer, first_block, num_blocks)
        outgoing.coverage.add(layer, first_block, num_blocks)
        outgoing.to_frame += 1

    def frame(self, outgoing: Outgoing, layer: int, first_block: int, num_blocks: int, payload: Payload) -> None:
        """Queues a frame of accepted blocks that lie in a slot. The slot returns through `credits` in any case."""
        self._lent.add(payload.slot)
        if outgoing.error:
            self.returned(payload.slot)
            raise outgoing.error.fresh()
        message = self._announced(Kind.FRAME, outgoing.handle, payload)
        message.layer, message.first_block, message.num_blocks = layer, first_block, num_blocks
        message.source, message.extent = outgoing.source, NEAR if layer in self._local.near.layers else WHOLE
        if message.later is not None:
            outgoing.gathering.append(message)
        outgoing.to_frame -= 1
        outgoing.bytes_sent += payload.length
        self.outbox.append(message)
        self._complete(outgoing)

    def fetch(self, fetch: Fetch) -> None:
        """Asks the receiver to push cached blocks. The result shows only in the transfer that expects these blocks."""
        self.opened()
        self._send(Kind.FETCH, 0, fetch.packed())

    def probe(self, payload: Payload) -> int:
        """Queues a probe and returns its handle; `probed[handle]` becomes True if the receiver saw the same bytes."""
        self.opened()
        handle = self._next_handle()
        self._lent.add(payload.slot)
        self._probes[handle] = self._announced(Kind.PROBE, handle, payload)
        self.outbox.append(self._probes[handle])
        return handle

    def commit(self, outgoing: Outgoing, payload: bytes) -> None:
        """Commits a transfer whose blocks have all been accepted. The outcome comes through `ended`."""
        self._pushing(outgoing)
        if missing := outgoing.coverage.missing:
            text = f"{outgoing.transfer_id}: commit with {missing} (layer, block) pairs not pushed"
            self.abort(outgoing, TransferError("FAILED_PRECONDITION", text))
            self._pushing(outgoing)
        outgoing.state, outgoing.committed = PushState.COMMITTING, payload
        self._complete(outgoing)

    def abort(self, outgoing: Outgoing, error: TransferError) -> None:
        """Fails a transfer with `error`, here and at the receiver; does nothing if it has ended."""
        if outgoing.handle in self._live:
            self._end(outgoing, error)
            self._send(Kind.ABORT, outgoing.handle, Failure(code=error.code, message=error.message).packed())

    def fail(self, error: TransferError) -> None:
        """Fails every transfer of the lost link with `error`."""
        self.error = self.error or error
        self.outbox.clear()
        for outgoing in list(self._live.values()):
            self._end(outgoing, error)

    def returned(self, slot: int) -> None:
        """Returns a slot that has been read, or never will be, to `credits`; ignores a slot that was not lent."""
        if slot in self._lent:
            self._lent.remove(slot)
            self.credits.append(slot)

    def tick(self, now: float) -> None:
        """Raises TransferError(UNAVAILABLE) once the peer has been silent, or has heard nothing, for too long."""
        self.liveness.sole = self._local.vitals.has_sole_peer()
        if self.liveness.lost(now):
            raise TransferError("UNAVAILABLE", f"nothing heard from {self.remote} for {self.liveness.limit_s:.1f} s")
        if self.liveness.unheard(now):  # close even a sole peer's link: on a new one the peer may hear
            raise TransferError("UNAVAILABLE", f"{self.remote} hears nothing of what is sent to it")
        if self.welcome and self.liveness.ping_due(now):
            self.outbox.appendleft(self._message(Kind.PING, body=pulse_of(self._local.vitals)))
        self.expire(now)

    def expire(self, now: float) -> None:
        """Fails the transfers whose deadline has passed."""
        for outgoing in [o for o in self._live.values() if now >= o.deadline]:
            self.abort(outgoing, TransferError("DEADLINE_EXCEEDED", f"{outgoing.transfer_id}: deadline passed"))

    def receive(self, message: LinkMessage, now: float) -> None:
        """Takes one message of the peer. Raises TransferError if the link cannot continue."""
        if checksum(message.body) != message.payload_sum:
            raise TransferError("DATA_LOSS", f"a damaged {message.kind.name} message")
        if self.welcome is None:
            self._answered(message)
        elif message.nonce == self._nonce:  # messages of other incarnations are ignored
            self._control(message, now)

    def _answered(self, message: LinkMessage) -> None:
        if message.kind is Kind.REFUSE:
            raise parse(Failure, message.body).error()
        if message.kind is not Kind.WELCOME:
            raise TransferError("FAILED_PRECONDITION", f"{message.kind.name} came before WELCOME")
        welcome = parse(Welcome, message.body)
        check_proof(welcome, self._local.secret, self.hello.proof)
        if welcome.receiver != self.remote or welcome.transport not in self.hello.offers:
            text = f"asked for {self.remote} over {sorted(self.hello.offers)}, got {welcome.receiver}"
            raise TransferError("FAILED_PRECONDITION", f"{text}, {welcome.transport}")
        self._nonce = link_nonce(self._local.identity, self.remote, self.hello.nonce, welcome.nonce)
        self.welcome = welcome

    def _control(self, message: LinkMessage, now: float) -> None:
        outgoing = self._live.get(message.handle)
        match message.kind:
            case Kind.PING:
                take_pulse(message, self.liveness, now)
                self.outbox.appendleft(self._message(Kind.PONG))
            case Kind.PROBE_ACK if message.handle in self._probes:
                seen = int.from_bytes(message.body, "little")
                self.probed[message.handle] = seen == self._probes.pop(message.handle).payload_sum
            case Kind.ACK if outgoing and outgoing.state is PushState.COMMITTING:
                self._end(outgoing, None)
            case Kind.NACK if outgoing:
                self._end(outgoing, parse(Failure, message.body).error())

    @property
    def num_live(self) -> int:
        """The number of transfers under way."""
        return len(self._live)

    def violations(self, accounted: Container[str], now: float) -> list[str]:
        """Describes the pushes that are not `accounted` for by a request, or that should have ended."""
        wrong = []
        for outgoing in self._live.values():
            if outgoing.state is PushState.PUSHING and outgoing.transfer_id not in accounted:
                wrong.append(f"push {outgoing.transfer_id}: under way, but no request's")
            elif now > outgoing.deadline + LATE_S:
                wrong.append(f"push {outgoing.transfer_id}: under way still behind its deadline")
        return wrong

    def opened(self) -> Welcome:
        """Returns the receiver's WELCOME. Raises TransferError if the link is not open yet, or has failed."""
        if self.error:
            raise self.error.fresh()
        if self.welcome is None:
            raise TransferError("UNAVAILABLE", f"the link to {self.remote} is not open yet")
        return self.welcome

    def _pushing(self, outgoing: Outgoing) -> None:
        if outgoing.error:
            raise outgoing.error.fresh()
        if outgoing.state is not PushState.PUSHING:
            raise TransferError("FAILED_PRECONDITION", f"{outgoing.transfer_id}: already committed")

    def _complete(self, outgoing: Outgoing) -> None:
        """Queues COMMIT once the transfer is committed and its last frame is queued."""
        if outgoing.committed is not None and not outgoing.to_frame:
            self._send(Kind.COMMIT, outgoing.handle, outgoing.committed)

    def _end(self, outgoing: Outgoing, error: TransferError | None) -> None:
        del self._live[outgoing.handle]
        outgoing.error, outgoing.state = error, PushState.FAILED if error else PushState.DONE
        self.ended.append(outgoing)
        if error:
            self._unqueue(outgoing.handle)

    def _unqueue(self, handle: int) -> None:
        """Drops a failed transfer's queued FRAMEs and COMMIT. Its BEGIN stays, or the ABORT would mean nothing."""
        kept: deque[LinkMessage] = deque()
        for message in self.outbox:
            if message.kind in (Kind.FRAME, Kind.COMMIT) and message.handle == handle:
                self.returned(message.slot)
            else:
                kept.append(message)
        self.outbox = kept

    def _announced(self, kind: Kind, handle: int, payload: Payload) -> LinkMessage:
        message = LinkMessage(kind, self._nonce, handle, length=payload.length, offset=payload.slot, slot=payload.slot)
        if callable(payload.checksum):
            message.later = payload.checksum
        else:
            message.payload_sum = payload.checksum
        if payload.body is not None:
            message.offset, message.body = INLINE, payload.body
        return message

    def _send(self, kind: Kind, handle: int, body: Bytes) -> None:
        self.outbox.append(self._message(kind, handle, body))

    def _message(self, kind: Kind, handle: int = 0, body: Bytes = b"") -> LinkMessage:
        return control(kind, bytes(body), nonce=self._nonce, handle=handle)

    def _next_handle(self) -> int:
        self._handles += 1
        return self._handles
