"""The sender's end of a link: the protocol, the memory of waiting payloads, and callers' futures, behind one lock.

Two kinds of threads meet here. Engine threads take a slot, gather blocks into it without the lock, and queue a frame;
the link's connection writes frames, receives answers, and frees slots. The connection also gathers rows on a device,
which may not have computed them yet: the engine's thread waits neither for a slot nor for the rows. Futures resolve
outside the lock.

    opening -> WELCOME: the chosen transport opens -> a probe of one block, there and back -> open -> closed
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections import deque
from collections.abc import Callable, Container, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from tandem.process import IntegrityReport
from tandem.transfer.copy.rows import Rows
from tandem.transfer.protocol.endpoint import TransferError
from tandem.transfer.protocol.sender import Outgoing, Payload, SenderProtocol
from tandem.transfer.protocol.wire import MAX_CONTROL_BYTES, Fetch, KVSource, LinkMessage, Welcome
from tandem.transfer.runtime.connection import POLL_SECONDS, burst
from tandem.transfer.runtime.driver import Driver
from tandem.transfer.runtime.slots import Slots
from tandem.transfer.transports.base import Mark, SendSide, Slot

# The first and the longest pause between two looks for free slots: a receiver releases slots without a message.
PAUSE_SECONDS = (20e-6, 1e-3)
PATTERN_BYTES = 4096

T = TypeVar("T")


@dataclass(eq=False, slots=True)
class Probe:
    """Probe bytes being sent. `future` resolves to the seconds until the receiver has confirmed them."""

    left: int
    start: float
    deadline: float
    waiting: set[int] = field(default_factory=set)
    future: Future[float] = field(default_factory=Future)


@dataclass(frozen=True, slots=True)
class Frame:
    """Blocks that fit one slot. behind: the device's work that must be done before the blocks can be gathered."""

    outgoing: Outgoing
    layer: int
    first_block: int
    rows: Rows
    ids: NDArray[np.int64]
    behind: Mark | None


class SendingEnd:
    """The sender's end. `sides`: each transport's memory offered to the receiver, best first; the receiver takes one of
    them, and the others are closed.

    opened: resolves, within `timeout_s`, to the seconds of the opening probe.
    """

    patience = 0.0

    def __init__(
        self, protocol: SenderProtocol, sides: dict[str, SendSide], *, frame_bytes: int, driver: Driver,
        timeout_s: float,
    ) -> None:  # fmt: skip
        self.liveness = protocol.liveness
        self.max_frame_bytes = MAX_CONTROL_BYTES  # receivers send no larger messages
        self.opened: Future[float] = Future()
        self.opened.set_running_or_notify_cancel()
        self._protocol, self._sides, self._frame_bytes, self._driver = protocol, sides, frame_bytes, driver
        self._open_by = driver.now() + timeout_s
        self._side: SendSide | None = None
        self._slots: Slots | None = None
        self._probes: list[Probe] = []
        self._to_gather: deque[Frame] = deque()
        self._new_to_gather = False  # True if frames were added since the last attempt to gather
        self._changed = threading.Condition()
        self._futures: dict[Outgoing, Future[None]] = {}
        self._resolve: list[Callable[[], None]] = []
        self._pattern = hashlib.shake_128(str(protocol.hello.nonce).encode()).digest(PATTERN_BYTES)

    # --- for the link's connection ---

    @property
    def under_way(self) -> bool:
        return bool(self._protocol.num_live or self._probes or not self.opened.done())

    @property
    def small(self) -> bool:
        return self._side is not None and not self._side.inline

    @property
    def poll_s(self) -> float:
        first = self._first()
        unready = bool(self._to_gather) or (first is not None and first.later is not None)
        return POLL_SECONDS if unready or (self._side is not None and self._side.busy) else math.inf

    def pending(self) -> bool:
        first = self._first()
        return (first is not None and first.ready) or self._new_to_gather

    def _first(self) -> LinkMessage | None:
        with self._changed:  # another thread may take messages
            return self._protocol.outbox[0] if self._protocol.outbox else None

    def resume(self) -> bool:
        """Gathers waiting frames as long as slots are free. Returns True if any was gathered."""
        moved = self._new_to_gather = False
        while taken := self._next_to_gather():
            with suppress(TransferError):  # the frame's transfer may have ended meanwhile
                self._gather(*taken)
            moved = True
        return moved

    def take(self) -> list[LinkMessage]:
        with self._changed:
            return burst(self._protocol.outbox)

    def sent(self, messages: list[LinkMessage]) -> None:
        with self._changed:
            if self._side:
                self._side.sent(messages)
                self._free()
            self._changed.notify_all()

    def receive(self, message: LinkMessage) -> None:
        with self._turn() as protocol:
            protocol.receive(message, self._driver.now())
            if protocol.welcome and self._slots is None:
                self._open(protocol.welcome)

    def tick(self) -> None:
        now = self._driver.now()
        with self._turn() as protocol:
            if not self.opened.done() and now >= self._open_by:
                raise TransferError("UNAVAILABLE", f"no answer from {protocol.remote}")
            for probe in [probe for probe in self._probes if now >= probe.deadline]:
                self._end_probe(probe, TransferError("DEADLINE_EXCEEDED", f"probe: no answer from {protocol.remote}"))
            if self._side:
                self._side.check()
            protocol.tick(now)

    def closed(self, error: TransferError) -> None:
        with self._turn() as protocol:
            protocol.fail(error)
            for probe in list(self._probes):
                self._end_probe(probe, error)
            for side in self._sides.values():
                side.close()
            self._sides, self._side, self._slots = {}, None, None
            self._to_gather.clear()
        if not self.opened.done():
            self.opened.set_exception(error)

    # --- for links and pushes, from any thread ---

    @property
    def error(self) -> TransferError | None:
        return self._protocol.error

    @property
    def welcome(self) -> Welcome | None:
        return self._protocol.welcome

    @property
    def carrier(self) -> str:
        side = self._side
        return side.carrier() if side else ""

    @property
    def slots(self) -> Slots:
        """The slots and sizes of frames. Raises TransferError if the link is not open."""
        slots = self._slots
        if slots is None:
            self._protocol.opened()
            raise TransferError("UNAVAILABLE", "the link is still opening")
        return slots

    def begin(
        self, transfer_id: str, first_block: int, num_blocks: int, num_layers: int, timeout_s: float, source: KVSource
    ) -> Outgoing:
        with self._turn() as protocol:
            return protocol.begin(
                transfer_id, first_block=first_block, num_blocks=num_blocks, num_layers=num_layers,
                deadline=self._driver.now() + timeout_s, source=source,
            )  # fmt: skip

    def fetch(self, fetch: Fetch) -> None:
        with self._turn() as protocol:
            protocol.fetch(fetch)

    def push(self, outgoing: Outgoing, layer: int, first_block: int, rows: Rows, ids: NDArray[np.int64]) -> None:
        """Queues a frame of blocks that fit one slot. Blocks in host memory are copied now, waiting for a free slot;
        blocks on a device are gathered soon."""
        side = self._side
        frame = Frame(outgoing, layer, first_block, rows, ids, side.mark() if side else None)
        if frame.behind is None:
            self._gather(frame, *self._take_waiting(frame))
            return
        with self._changed:
            self._protocol.expire(self._driver.now())
            self._accept(frame)
            self._to_gather.append(frame)
            self._new_to_gather = True

    def commit(self, outgoing: Outgoing, payload: bytes) -> Future[None]:
        future: Future[None] = Future()
        future.set_running_or_notify_cancel()  # only the receiver's answer ends it
        with self._turn() as protocol:
            protocol.commit(outgoing, payload)
            self._futures[outgoing] = future
        return future

    def abort(self, outgoing: Outgoing, error: TransferError) -> None:
        with self._turn() as protocol:
            protocol.abort(outgoing, error)

    def probe(self, nbytes: int, timeout_s: float) -> Future[float]:
        """Sends `nbytes` as slots become free; the future resolves to the seconds until they are confirmed."""
        now = self._driver.now()
        probe = Probe(nbytes, now, now + timeout_s)
        probe.future.set_running_or_notify_cancel()
        with self._turn() as protocol:
            protocol.opened()
            self._probes.append(probe)
        return probe.future

    def check_integrity(self, accounted: Container[str]) -> IntegrityReport:
        with self._changed:
            self._free()
            protocol, slots = self._protocol, self._slots.num_taken if self._slots else 0
            wrong = protocol.violations(accounted, self._driver.now())
            if slots and not protocol.num_live and not self._probes:
                wrong.append(f"link to {protocol.remote}: {slots} slots are taken, and nothing is under way")
            return IntegrityReport({"transfers": protocol.num_live, "slots": slots}, tuple(wrong))

    def _next_to_gather(self) -> tuple[Frame, Slot, SendSide] | None:
        with self._changed:
            while self._to_gather and self._to_gather[0].outgoing.error:
                self._to_gather.popleft()
            if not self._to_gather or self._side is None:
                return None
            slot = self._take(len(self._to_gather[0].ids) * self.slots.block_bytes)
            return (self._to_gather.popleft(), slot, self._side) if slot else None

    def _gather(self, frame: Frame, slot: Slot, side: SendSide) -> None:
        outgoing = frame.outgoing
        try:
            payload_sum = side.gather(frame.rows, frame.ids, slot, frame.behind)
        except BaseException as error:
            with self._changed:
                self._give(slot.offset)
                self._protocol.abort(outgoing, TransferError("INTERNAL", f"blocks cannot be read: {error!r}"))
            raise
        payload = Payload(slot.offset, slot.nbytes, payload_sum, side.body(slot))
        with self._changed:  # if the transfer failed, `frame` returns the slot to the credits
            self._protocol.frame(outgoing, frame.layer, frame.first_block, len(frame.ids), payload)

    # --- called under the lock ---

    def _open(self, welcome: Welcome) -> None:
        """Opens the transport that the WELCOME names, makes slots for its block size and starts the opening probe."""
        if welcome.transport not in self._sides:
            return  # the link has been closed
        side = self._sides.pop(welcome.transport)
        for other in self._sides.values():
            other.close()
        self._sides = {welcome.transport: side}
        if said := side.open():
            self._protocol.tell(said)
        self._open_by += side.open_s
        slots = Slots(side, welcome.block_bytes, min(self._frame_bytes, welcome.max_frame_bytes))
        if not slots.holds_a_block:
            text = f"arena_bytes: {side.size} cannot hold one block of {welcome.block_bytes} bytes"
            raise TransferError("FAILED_PRECONDITION", text)
        self._side, self._slots = side, slots
        now = self._driver.now()
        self._probes.append(Probe(welcome.block_bytes, now, self._open_by, future=self.opened))

    def _advance(self, probe: Probe, slots: Slots, side: SendSide) -> None:
        while probe.left and (slot := self._take(min(probe.left, slots.frame_bytes))):
            data = (self._pattern * (slot.nbytes // PATTERN_BYTES + 1))[: slot.nbytes]
            payload = Payload(slot.offset, slot.nbytes, side.write(data, slot), side.body(slot))
            probe.waiting.add(self._protocol.probe(payload))
            probe.left -= slot.nbytes
        for handle in probe.waiting & self._protocol.probed.keys():
            probe.waiting.remove(handle)
            if not self._protocol.probed.pop(handle):
                text = f"probe: {self._protocol.remote} saw other bytes than were sent"
                self._end_probe(probe, TransferError("DATA_LOSS", text))
                return
        if not probe.left and not probe.waiting:
            self._end_probe(probe, None)

    def _end_probe(self, probe: Probe, error: TransferError | None) -> None:
        self._probes.remove(probe)
        self._resolve.append(_resolution(probe.future, self._driver.now() - probe.start, error))

    def _accept(self, frame: Frame) -> None:
        self._protocol.accept(frame.outgoing, frame.layer, frame.first_block, len(frame.ids))

    def _take_waiting(self, frame: Frame) -> tuple[Slot, SendSide]:
        with self._changed:
            for pause in _pauses():
                self._protocol.expire(self._driver.now())
                self._protocol.check(frame.outgoing, frame.layer, frame.first_block, len(frame.ids))
                if (slot := self._take(len(frame.ids) * self.slots.block_bytes)) and self._side:
                    self._accept(frame)
                    return slot, self._side
                self._driver.pause(self._changed, pause)
        raise AssertionError("pauses never end")

    def _take(self, nbytes: int) -> Slot | None:
        self._free()
        return self.slots.take(nbytes)

    def _free(self) -> None:
        for slot in self._side.released() if self._side else ():
            self._protocol.returned(slot)
        for slot in self._protocol.credits:
            self._give(slot)
        self._protocol.credits.clear()

    def _give(self, slot: int) -> None:
        if self._slots:
            self._slots.give(slot)
        self._changed.notify_all()

    @contextmanager
    def _turn(self) -> Iterator[SenderProtocol]:
        """Yields the protocol under the lock; afterwards, uses freed slots and resolves settled futures."""
        resolve: list[Callable[[], None]] = []
        try:
            with self._changed:
                try:
                    yield self._protocol
                finally:
                    self._settle()
                    resolve, self._resolve = self._resolve, []
        finally:
            for resolution in resolve:
                resolution()

    def _settle(self) -> None:
        self._free()
        if self._slots and self._side:
            for probe in list(self._probes):
                self._advance(probe, self._slots, self._side)
        ended, self._protocol.ended = self._protocol.ended, []
        for outgoing in ended:
            if future := self._futures.pop(outgoing, None):
                self._resolve.append(_resolution(future, None, outgoing.error))
        self._changed.notify_all()


def _resolution(future: Future[T], result: T, error: TransferError | None) -> Callable[[], None]:
    return (lambda: future.set_exception(error.fresh())) if error else (lambda: future.set_result(result))


def _pauses() -> Iterator[float]:
    pause, longest = PAUSE_SECONDS
    while True:
        yield pause
        pause = min(2 * pause, longest)
