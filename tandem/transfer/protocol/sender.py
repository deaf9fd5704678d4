"""The sending end of a link as a state machine: no socket, no thread, no clock; time comes in as `now`.

    link      HELLO -> WELCOME (open) | REFUSE (failed)
    transfer  begin: BEGIN -> PUSHING --frame: FRAME*--> commit: COMMIT -> COMMITTING -> ACK: DONE
              at any time: abort or deadline (ABORT goes out), NACK or loss of the link -> FAILED

The owner writes what stands in `outbox` to the peer and reports each message as `sent`; it takes what has come free
from `credits` (arena slots) and `ended` (transfers whose outcome is known) after every call.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from tandem.transfer.protocol.coverage import Coverage
from tandem.transfer.protocol.endpoint import Endpoint, TransferError
from tandem.transfer.protocol.liveness import Liveness
from tandem.transfer.protocol.wire import (
    INLINE,
    Begin,
    Bytes,
    Failure,
    Hello,
    Kind,
    Message,
    ShmOffer,
    Welcome,
    checksum,
    control,
    link_nonce,
    parse,
)


class State(Enum):
    PUSHING = auto()
    COMMITTING = auto()
    DONE = auto()
    FAILED = auto()


@dataclass(eq=False, slots=True)
class Outgoing:
    """One transfer. `error` says why it FAILED."""

    handle: int
    transfer_id: str
    deadline: float
    coverage: Coverage
    state: State = State.PUSHING
    error: TransferError | None = None
    bytes_sent: int = 0


class SenderProtocol:
    def __init__(
        self, local: Endpoint, remote: Endpoint, *, nonce: int, transports: Sequence[str], shm: ShmOffer | None = None,
        now: float,
    ) -> None:  # fmt: skip
        self.local, self.remote = local, remote
        self.liveness = Liveness(now, now)
        self.hello = Hello(sender=local, receiver=remote, nonce=nonce, transports=list(transports), shm=shm)
        self.outbox: deque[Message] = deque([control(Kind.HELLO, self.hello.packed())])
        self.welcome: Welcome | None = None
        self.error: TransferError | None = None
        self.ended: list[Outgoing] = []
        self.credits: list[int] = []
        self.probed: dict[int, bool] = {}
        self._nonce = 0
        self._handles = 0
        self._live: dict[int, Outgoing] = {}
        self._probes: dict[int, int] = {}
        self._lent: set[int] = set()

    @property
    def inline(self) -> bool:
        """Whether payloads travel in the stream rather than in an arena."""
        return self.welcome is None or self.welcome.transport != "shm"

    def begin(
        self, transfer_id: str, *, first_block: int, num_blocks: int, num_layers: int, deadline: float
    ) -> Outgoing:
        """Opens a transfer of blocks [first_block, first_block + num_blocks) of every layer."""
        welcome = self.opened()
        if num_layers != welcome.num_layers or first_block < 0 or num_blocks < 0:
            have = f"num_layers {num_layers}, first_block {first_block}, num_blocks {num_blocks}"
            raise TransferError("FAILED_PRECONDITION", f"begin: {have}; the receiver has {welcome.num_layers} layers")
        coverage = Coverage(first_block, num_blocks, num_layers)
        outgoing = Outgoing(self._next_handle(), transfer_id, deadline, coverage)
        self._live[outgoing.handle] = outgoing
        body = Begin(
            transfer_id=transfer_id, first_block=first_block, num_blocks=num_blocks, num_layers=num_layers
        ).packed()
        self._send(Kind.BEGIN, outgoing.handle, body)
        return outgoing

    def check(self, outgoing: Outgoing, layer: int, first_block: int, num_blocks: int) -> None:
        """Raises unless these blocks may be pushed now; a wrong push fails the transfer."""
        self._pushing(outgoing)
        if fault := outgoing.coverage.fault(layer, first_block, num_blocks):
            self.abort(outgoing, TransferError("FAILED_PRECONDITION", f"{outgoing.transfer_id}: {fault}"))
            self._pushing(outgoing)

    def frame(
        self, outgoing: Outgoing, layer: int, first_block: int, num_blocks: int, *, slot: int, payload: memoryview,
        payload_sum: int,
    ) -> None:  # fmt: skip
        """Queues blocks that lie in arena slot `slot`, which comes back through `credits` whatever happens."""
        self._lent.add(slot)
        try:
            self.check(outgoing, layer, first_block, num_blocks)
        except TransferError:
            self.returned(slot)
            raise
        outgoing.coverage.add(layer, first_block, num_blocks)
        outgoing.bytes_sent += len(payload)
        message = self._payload(Kind.FRAME, outgoing.handle, slot, payload, payload_sum)
        message.layer, message.first_block, message.num_blocks = layer, first_block, num_blocks
        self.outbox.append(message)

    def probe(self, slot: int, payload: memoryview, payload_sum: int) -> int:
        """Queues a probe; `probed[handle]` will say whether the receiver saw the same bytes."""
        self.opened()
        handle = self._next_handle()
        self._lent.add(slot)
        self._probes[handle] = payload_sum
        self.outbox.append(self._payload(Kind.PROBE, handle, slot, payload, payload_sum))
        return handle

    def commit(self, outgoing: Outgoing, payload: bytes) -> None:
        """Every frame has been queued: `ended` will tell whether all of them verified."""
        self._pushing(outgoing)
        if missing := outgoing.coverage.missing:
            text = f"{outgoing.transfer_id}: commit with {missing} (layer, block) pairs not pushed"
            self.abort(outgoing, TransferError("FAILED_PRECONDITION", text))
            self._pushing(outgoing)
        self._send(Kind.COMMIT, outgoing.handle, payload)
        outgoing.state = State.COMMITTING

    def abort(self, outgoing: Outgoing, error: TransferError) -> None:
        """Fails the transfer for this reason and tells the receiver; nothing to do where it has ended."""
        if outgoing.handle in self._live:
            self._end(outgoing, error)
            self._send(Kind.ABORT, outgoing.handle, Failure(code=error.code, message=error.message).packed())

    def fail(self, error: TransferError) -> None:
        """The link is gone, and with it every transfer on it."""
        self.error = self.error or error
        self.outbox.clear()
        for outgoing in list(self._live.values()):
            self._end(outgoing, error)

    def sent(self, messages: Sequence[Message], now: float) -> None:
        self.liveness.sent_at = now
        for message in messages:
            if message.slot >= 0 and message.offset == INLINE:
                self.returned(message.slot)

    def returned(self, slot: int) -> None:
        """The receiver has read this arena slot, or never will; no error where it was not lent."""
        if slot in self._lent:
            self._lent.remove(slot)
            self.credits.append(slot)

    def tick(self, now: float) -> None:
        """Raises TransferError(UNAVAILABLE) once the peer has been silent for too long."""
        if self.liveness.lost(now):
            raise TransferError("UNAVAILABLE", f"nothing heard from {self.remote} for {self.liveness.limit} s")
        if self.welcome and self.liveness.ping_due(now):
            self.liveness.sent_at = now
            self.outbox.appendleft(control(Kind.PING, nonce=self._nonce))
        self.expire(now)

    def expire(self, now: float) -> None:
        """Fails the transfers whose deadline has passed."""
        for outgoing in [o for o in self._live.values() if now >= o.deadline]:
            self.abort(outgoing, TransferError("DEADLINE_EXCEEDED", f"{outgoing.transfer_id}: deadline passed"))

    def receive(self, message: Message) -> None:
        """Takes one message of the peer. Raises TransferError where the link cannot go on."""
        if checksum(message.body) != message.payload_sum:
            raise TransferError("DATA_LOSS", f"a damaged {message.kind.name} message")
        if self.welcome is None:
            self._answered(message)
        elif message.nonce == self._nonce:  # a message of another incarnation says nothing about this link
            self._heed(message)

    def _answered(self, message: Message) -> None:
        if message.kind is Kind.REFUSE:
            raise parse(Failure, message.body).error()
        if message.kind is not Kind.WELCOME:
            raise TransferError("FAILED_PRECONDITION", f"{message.kind.name} came before WELCOME")
        welcome = parse(Welcome, message.body)
        if welcome.receiver != self.remote or welcome.transport not in self.hello.transports:
            text = f"asked for {self.remote} over {self.hello.transports}, got {welcome.receiver}, {welcome.transport}"
            raise TransferError("FAILED_PRECONDITION", text)
        self._nonce = link_nonce(self.local, self.remote, self.hello.nonce, welcome.nonce)
        self.welcome = welcome

    def _heed(self, message: Message) -> None:
        outgoing = self._live.get(message.handle)
        match message.kind:
            case Kind.PING:
                self.outbox.appendleft(control(Kind.PONG, nonce=self._nonce))
            case Kind.PROBE_ACK if message.handle in self._probes:
                seen = int.from_bytes(message.body, "little")
                self.probed[message.handle] = seen == self._probes.pop(message.handle)
            case Kind.ACK if outgoing and outgoing.state is State.COMMITTING:
                self._end(outgoing, None)
            case Kind.NACK if outgoing:
                self._end(outgoing, parse(Failure, message.body).error())

    def opened(self) -> Welcome:
        """What the receiver said of itself. Raises why the link is not, or no longer, open."""
        if self.error:
            raise self.error.fresh()
        if self.welcome is None:
            raise TransferError("UNAVAILABLE", f"the link to {self.remote} is not open yet")
        return self.welcome

    def _pushing(self, outgoing: Outgoing) -> None:
        if outgoing.error:
            raise outgoing.error.fresh()
        if outgoing.state is not State.PUSHING:
            raise TransferError("FAILED_PRECONDITION", f"{outgoing.transfer_id}: already committed")

    def _end(self, outgoing: Outgoing, error: TransferError | None) -> None:
        del self._live[outgoing.handle]
        outgoing.error, outgoing.state = error, State.FAILED if error else State.DONE
        self.ended.append(outgoing)
        if error:
            self._unqueue(outgoing.handle)

    def _unqueue(self, handle: int) -> None:
        """Drops what a failed transfer had yet to send; not its BEGIN, without which the ABORT would mean nothing."""
        kept: deque[Message] = deque()
        for message in self.outbox:
            if message.kind in (Kind.FRAME, Kind.COMMIT) and message.handle == handle:
                self.returned(message.slot)
            else:
                kept.append(message)
        self.outbox = kept

    def _payload(self, kind: Kind, handle: int, slot: int, payload: memoryview, payload_sum: int) -> Message:
        message = Message(
            kind, self._nonce, handle, length=len(payload), payload_sum=payload_sum, offset=slot, slot=slot
        )
        if self.inline:
            message.offset, message.body = INLINE, payload
        return message

    def _send(self, kind: Kind, handle: int, body: Bytes) -> None:
        self.outbox.append(control(kind, bytes(body), nonce=self._nonce, handle=handle))

    def _next_handle(self) -> int:
        self._handles += 1
        return self._handles
