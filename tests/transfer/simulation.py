"""The protocol's real code in a simulated world: one link, a clock that is a number, a network that loses and damages.

    sender protocol --encoded messages--> wire --> receiver protocol --> cache
                    <-------------------- wire <--

Every message is encoded and parsed again, as on a socket. The wire may drop, double, reorder and damage messages, or
deliver one as another incarnation would have sent it; in shm mode the arena itself may be overwritten.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from tandem.transfer import LocalPeer
from tandem.transfer.copy.copier import Copier
from tandem.transfer.protocol.endpoint import FrameShape, LinkPeer, TransferError
from tandem.transfer.protocol.landings import Landing, Landings
from tandem.transfer.protocol.receiver import ReceiverProtocol, Write
from tandem.transfer.protocol.sender import Outgoing, Payload, SenderProtocol
from tandem.transfer.protocol.wire import HEADER_BYTES, INLINE, Hello, LinkMessage, checksum, parse_header
from tandem.transfer.transports.base import ReceiveSide
from tandem.transfer.transports.host import HostReceiveSide

BLOCK_BYTES, NUM_BLOCKS, NUM_LAYERS, FRAME_BLOCKS = 32, 24, 2, 2
ARENA_SLOTS = 6
SENDER, RECEIVER = LinkPeer("p", "p-1", "layout"), LinkPeer("d", "d-1", "layout")
DEADLINE = 20.0

Wire = deque[bytes]


@dataclass
class Chances:
    """How likely each fault is, for each message (or, `cancel` and `abort`, for each step; a cancel may also come
    between a frame's check and its copy, and while it is copied)."""

    drop: float = 0.0
    double: float = 0.0
    swap: float = 0.0
    damage: float = 0.0
    stale: float = 0.0
    overwrite: float = 0.0
    cancel: float = 0.0
    abort: float = 0.0


@dataclass
class Transfer:
    """One transfer as both sides' owners see it."""

    name: str
    there: list[int]
    first_block: int
    source: np.ndarray
    todo: list[tuple[int, int, int]]
    outgoing: Outgoing | None = None
    endings: list[str] = field(default_factory=list)


class SharedSide(HostReceiveSide):
    """Payloads lie in the arena."""

    def __init__(self, arena: np.ndarray) -> None:
        super().__init__("shared", Copier())
        self._arena = arena

    def payload(self, message: LinkMessage) -> memoryview:
        return self._arena[message.offset : message.offset + message.length].data

    def fault(self, message: LinkMessage) -> str:
        return "" if message.offset + message.length <= len(self._arena) else "outside the arena"


class TransferWorld:
    def __init__(self, seed: int, chances: Chances, *, shm: bool) -> None:
        self.random, self.chances = random.Random(seed), chances
        self.now = 0.0
        self.arena = np.zeros(ARENA_SLOTS * FRAME_BLOCKS * BLOCK_BYTES, np.uint8)
        self.free = [slot * FRAME_BLOCKS * BLOCK_BYTES for slot in range(ARENA_SLOTS)]
        self.cache = np.zeros((NUM_LAYERS, NUM_BLOCKS, BLOCK_BYTES), np.uint8)
        self.table = Landings()
        self.side = SharedSide(self.arena) if shm else HostReceiveSide("inline", Copier())
        self.sender = SenderProtocol(LocalPeer(SENDER), RECEIVER, nonce=1, offers={self.side.name: {}}, now=0.0)
        self.receiver = ReceiverProtocol(
            LocalPeer(RECEIVER), self.table, FrameShape(NUM_LAYERS, BLOCK_BYTES, FRAME_BLOCKS * BLOCK_BYTES),
            nonce=2, accept=self._accept, now=0.0,
        )  # fmt: skip
        self.there: Wire = deque()
        self.back: Wire = deque()
        self.transfers: list[Transfer] = []
        self.settled: dict[str, np.ndarray] = {}
        self.lost = False
        self.exchange(faults=False)

    def start(self, name: str, there: list[int], first_block: int) -> Transfer:
        """Expects a transfer of len(there) prompt blocks at the receiver and begins it at the sender."""
        num_blocks = len(there) - first_block
        source = np.frombuffer(self.random.randbytes(NUM_LAYERS * num_blocks * BLOCK_BYTES), np.uint8)
        todo = [
            (layer, block, min(FRAME_BLOCKS, len(there) - block))
            for layer in range(NUM_LAYERS)
            for block in range(first_block, len(there), FRAME_BLOCKS)
        ]
        transfer = Transfer(name, there, first_block, source.reshape(NUM_LAYERS, num_blocks, BLOCK_BYTES), todo)
        ids = np.array(there, np.int64)
        endings = transfer.endings
        self.table.expect(
            Landing(
                name,
                ids,
                first_block,
                DEADLINE,
                lambda *_: endings.append("commit"),
                lambda *_: endings.append("abort"),
            )
        )
        self.transfers.append(transfer)
        if not self.lost:
            transfer.outgoing = self.sender.begin(
                name, first_block=first_block, num_blocks=num_blocks, num_layers=NUM_LAYERS, deadline=DEADLINE
            )
        return transfer

    def step(self) -> None:
        """Each transfer moves on by one frame or its commit; then the wires carry what they carry."""
        for transfer in self.transfers:
            self._advance(transfer)
            if transfer.outgoing and self._chance("abort"):
                self.sender.abort(transfer.outgoing, TransferError("ABORTED", "simulated"))
            self._cancel_by_chance(transfer)
        self.exchange(faults=True)
        self.now += 0.1

    def push_next(self) -> None:
        """Each transfer queues its next frame, and nothing travels."""
        for transfer in self.transfers:
            self._advance(transfer)

    def finish(self) -> None:
        """Time passes until every deadline is over."""
        while self.now < DEADLINE + 1:
            self.exchange(faults=True)
            self.now += 0.5

    def exchange(self, *, faults: bool) -> None:
        """Both sides tick, what they say travels, and what arrives is received, until nothing moves."""
        for _ in range(50):
            self._tick()
            if not self.lost:
                self._collect(self.sender.outbox, self.there)
                self._collect(self.receiver.outbox, self.back)
            self._collect_slots()
            self._report()
            if not self.there and not self.back:
                return
            self._carry(self.there, self._at_receiver, faults)
            self._carry(self.back, self._at_sender, faults)

    def _advance(self, transfer: Transfer) -> None:
        try:
            if transfer.outgoing and transfer.todo and self.free:
                self._push(transfer, transfer.outgoing, *transfer.todo.pop(0))
            elif transfer.outgoing and not transfer.todo:
                self.sender.commit(transfer.outgoing, transfer.name.encode())
        except TransferError:
            transfer.outgoing = None  # it has failed or is committed: nothing more to do
        self._collect_slots()

    def _push(self, transfer: Transfer, outgoing: Outgoing, layer: int, block: int, count: int) -> None:
        self.sender.accept(outgoing, layer, block, count)
        slot = self.free.pop()
        payload = self.arena[slot : slot + count * BLOCK_BYTES]
        start = block - transfer.first_block
        payload[:] = transfer.source[layer, start : start + count].reshape(-1)
        body = None if isinstance(self.side, SharedSide) else payload.data
        self.sender.frame(outgoing, layer, block, count, Payload(slot, len(payload), checksum(payload.data), body))
        if self._chance("overwrite"):
            payload[self.random.randrange(len(payload))] ^= 1

    def _cancel_by_chance(self, transfer: Transfer) -> None:
        if not transfer.endings and self._chance("cancel"):
            self.table.cancel(transfer.name, Future())
            transfer.endings.append("cancel")
            self._fence()

    def _fence(self) -> None:
        """Checks that no write of a cancelled transfer is under way any more."""
        while self.table.fenced:
            self._settle(self._named(self.table.fenced.popleft().transfer_id))

    def _carry(self, wire: Wire, deliver: object, faults: bool) -> None:
        while wire:
            data = wire.popleft()
            if faults and self._chance("drop"):
                continue
            if faults and wire and self._chance("swap"):
                wire.append(data)
                data = wire.popleft()
            if faults and self._chance("double"):
                wire.append(data)
            if faults:
                data = self._spoiled(data)
            assert callable(deliver)
            try:
                deliver(data)
            except TransferError as error:
                self._lose(error)

    def _spoiled(self, data: bytes) -> bytes:
        if self._chance("damage"):
            damaged = bytearray(data)
            damaged[self.random.randrange(len(data))] ^= 1 << self.random.randrange(8)
            return bytes(damaged)
        if self._chance("stale"):
            message = parse_header(data)
            message.nonce ^= 1
            return message.header() + data[HEADER_BYTES:]
        return data

    def _at_receiver(self, data: bytes) -> None:
        if self.lost:
            return
        self.receiver.liveness.heard_at = self.now
        write = self.receiver.receive(parsed(data), self.now)
        if write:
            self._write(write)

    def _at_sender(self, data: bytes) -> None:
        if not self.lost:
            self.sender.liveness.heard_at = self.now
            self.sender.receive(parsed(data), self.now)

    def _write(self, write: Write) -> None:
        assert write.landing
        transfer = self._named(write.landing.transfer_id)
        self._cancel_by_chance(transfer)
        if not self.receiver.start(write):
            return
        self._cancel_by_chance(transfer)
        payload = np.frombuffer(self.side.payload(write.message), np.uint8)
        self.cache[write.message.layer, write.block_ids] = payload.reshape(-1, BLOCK_BYTES)
        self.receiver.written(write, checksum(payload.tobytes()))
        self._fence()

    def _tick(self) -> None:
        self.table.tick(self.now)
        for side in (self.sender, self.receiver):
            try:
                if not self.lost:
                    side.tick(self.now)
            except TransferError as error:
                self._lose(error)

    def _lose(self, error: TransferError) -> None:
        if not self.lost:
            self.lost = True
            self.sender.fail(error)
            self.receiver.fail(error)

    def _collect(self, outbox: deque[LinkMessage], wire: Wire) -> None:
        while outbox:
            message = outbox.popleft()
            body = bytes(message.body)
            wire.append(message.header() + body)
            side = self.sender if wire is self.there else self.receiver
            if side is self.sender:
                self._release([message] if message.offset == INLINE else [])
            else:
                self.receiver.sent([message])

    def _collect_slots(self) -> None:
        self._release(message for message in self.receiver.read if message.offset != INLINE)
        self.receiver.read.clear()
        self.free += self.sender.credits
        self.sender.credits.clear()

    def _release(self, messages: Iterable[LinkMessage]) -> None:
        for message in messages:
            self.sender.returned(message.slot if message.slot >= 0 else message.offset)

    def _report(self) -> None:
        for ended in (self.receiver.ended, self.table.ended):
            while ended:
                landing = ended.popleft()
                if landing.cancelled:
                    continue
                if landing.payload is not None:
                    landing.on_commit(landing.payload, landing.bytes_received)
                    self.receiver.acknowledge(landing)
                else:
                    landing.on_abort("", "")
                self.table.reported(landing)
                self._settle(self._named(landing.transfer_id))

    def _named(self, name: str) -> Transfer:
        return next(transfer for transfer in self.transfers if transfer.name == name)

    def _settle(self, transfer: Transfer) -> None:
        """From now on nobody may write this transfer's blocks for it: they get a mark that must stay."""
        blocks = transfer.there[transfer.first_block :]
        if transfer.endings[-1] == "commit":
            assert np.array_equal(self.cache[:, blocks], transfer.source), f"{transfer.name} committed wrong bytes"
        else:
            self.cache[:, blocks] = 0xEE
        self.settled[transfer.name] = self.cache[:, blocks].copy()

    def _accept(self, _hello: Hello) -> tuple[ReceiveSide, dict[str, str]]:
        return self.side, {}

    def _chance(self, name: str) -> bool:
        chance: float = getattr(self.chances, name)
        return chance > 0 and self.random.random() < chance


def parsed(data: bytes) -> LinkMessage:
    message = parse_header(data)
    message.body = memoryview(data)[HEADER_BYTES:]
    return message
