"""The sender's half of a link at work: the protocol, the arena and whoever waits, behind one lock.

Two kinds of threads meet here. Engine threads take a slot, gather into it without the lock the way that is faster now,
and queue a frame; the link's channel writes frames, takes answers in, and gives slots back. Futures resolve outside the
lock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from tandem.clock import Clock
from tandem.transfer.copy.copier import Copier
from tandem.transfer.copy.rows import Rows
from tandem.transfer.copy.store_policy import Way
from tandem.transfer.protocol.endpoint import TransferError
from tandem.transfer.protocol.sender import Outgoing, SenderProtocol
from tandem.transfer.protocol.wire import MAX_CONTROL_BYTES, Message, Welcome, checksum
from tandem.transfer.runtime.connection import burst
from tandem.transfer.transports.shm import Arena, Slot, Slots

PAUSE_SECONDS = (20e-6, 1e-3)  # the first and the longest between two looks: a receiver gives slots back silently


class Outlet:
    patience = 0.0

    def __init__(self, protocol: SenderProtocol, arena: Arena, copier: Copier, frame_bytes: int, clock: Clock) -> None:
        self.liveness = protocol.liveness
        self.max_frame_bytes = MAX_CONTROL_BYTES  # nothing larger comes back from a receiver
        self._protocol, self._copier, self._frame_bytes, self._clock = protocol, copier, frame_bytes, clock
        self._arena: Arena | None = arena
        self._slots: Slots | None = None
        self._way = Way()
        self._changed = threading.Condition()
        self._futures: dict[Outgoing, Future[None]] = {}

    # The port: called by the channel's thread.

    @property
    def small(self) -> bool:
        return not self._protocol.inline

    def pending(self) -> bool:
        return bool(self._protocol.outbox)

    def take(self) -> list[Message]:
        with self._changed:
            return burst(self._protocol.outbox)

    def sent(self, messages: list[Message]) -> None:
        with self._changed:
            self._protocol.sent(messages, self._clock.now())
            if self._protocol.credits:
                self._free()
                self._changed.notify_all()

    def receive(self, message: Message) -> None:
        with self._turn() as protocol:
            protocol.receive(message)
            if protocol.welcome and self._slots is None:
                self._cut(protocol.welcome)

    def tick(self) -> None:
        with self._turn() as protocol:
            protocol.tick(self._clock.now())

    def closed(self, error: TransferError) -> None:
        with self._turn() as protocol:
            protocol.fail(error)
            if self._arena:
                self._arena.sent_out()
            self._arena = self._slots = None

    # For links and pushes: called by any thread.

    @property
    def error(self) -> TransferError | None:
        return self._protocol.error

    @property
    def slots(self) -> Slots:
        """How frames are cut. Raises why the link is not open."""
        slots = self._slots
        if slots is None:
            self._protocol.opened()
            raise TransferError("UNAVAILABLE", "the link is still opening")
        return slots

    def opened(self, deadline: float) -> Welcome:
        """Waits for the receiver's answer. Raises its refusal, or DEADLINE_EXCEEDED."""

        def done() -> bool:
            return self._slots is not None or self._protocol.error is not None

        with self._changed:
            self._wait(done, deadline, f"no answer from {self._protocol.remote}")
            return self._protocol.opened()

    def begin(self, transfer_id: str, first_block: int, num_blocks: int, num_layers: int, deadline: float) -> Outgoing:
        with self._turn() as protocol:
            return protocol.begin(
                transfer_id, first_block=first_block, num_blocks=num_blocks, num_layers=num_layers, deadline=deadline
            )

    def push(self, outgoing: Outgoing, layer: int, first_block: int, rows: Rows, ids: NDArray[np.int64]) -> None:
        """Copies blocks that fit one slot into one, waiting for it, and queues the frame."""
        slot = self._slot(outgoing, layer, first_block, len(ids))
        try:
            payload_sum = self._gather(rows, ids, slot.view)
        except BaseException:
            self._give(slot)
            raise
        with self._changed:  # a failed transfer's slot is back among the credits
            self._protocol.frame(
                outgoing, layer, first_block, len(ids), slot=slot.offset, payload=slot.view, payload_sum=payload_sum,
            )  # fmt: skip

    def commit(self, outgoing: Outgoing, payload: bytes) -> Future[None]:
        future: Future[None] = Future()
        future.set_running_or_notify_cancel()  # only the receiver's word ends it
        with self._turn() as protocol:
            protocol.commit(outgoing, payload)
            self._futures[outgoing] = future
        return future

    def abort(self, outgoing: Outgoing, error: TransferError) -> None:
        with self._turn() as protocol:
            protocol.abort(outgoing, error)

    def probe(self, payload: bytes, deadline: float) -> int:
        """Queues a probe that fits one slot, waiting for it; returns its handle."""
        taken: list[Slot] = []

        def room() -> bool:
            if slot := self._take(len(payload)):
                taken.append(slot)
            return bool(taken)

        with self._changed:
            self._wait(room, deadline, "probe: no room to send")
            slot = taken[0]
            slot.view[:] = payload
            return self._protocol.probe(slot.offset, slot.view, checksum(slot.view))

    def probed(self, handles: set[int], deadline: float) -> bool:
        """Waits for the answers to these probes; whether the receiver saw the bytes that were sent."""
        answers = self._protocol.probed

        def done() -> bool:
            return self._protocol.error is not None or handles <= answers.keys()

        with self._changed:
            self._wait(done, deadline, f"probe: no answer from {self._protocol.remote}")
            self._protocol.opened()
            return {answers.pop(handle) for handle in handles} <= {True}

    def _gather(self, rows: Rows, ids: NDArray[np.int64], payload: memoryview) -> int:
        if self._protocol.inline:
            return self._copier.gather(rows, ids, payload, past_caches=False)
        past_caches, start = self._way.past_caches(), self._clock.now()
        payload_sum = self._copier.gather(rows, ids, payload, past_caches)
        self._way.took(past_caches, len(payload), self._clock.now() - start)
        return payload_sum

    def _slot(self, outgoing: Outgoing, layer: int, first_block: int, num_blocks: int) -> Slot:
        with self._changed:
            for pause in _pauses():
                self._protocol.expire(self._clock.now())
                self._protocol.check(outgoing, layer, first_block, num_blocks)
                if slot := self._take(num_blocks * self.slots.block_bytes):
                    return slot
                self._changed.wait(pause)
        raise AssertionError("pauses never end")

    def _take(self, nbytes: int) -> Slot | None:
        if self._arena:
            for slot in self._arena.posted():
                self._protocol.returned(slot)
            self._free()
        return self.slots.take(nbytes)

    def _give(self, slot: Slot) -> None:
        with self._changed:
            if self._slots:
                self._slots.give(slot.offset)
            self._changed.notify_all()

    def _cut(self, welcome: Welcome) -> None:
        """The receiver has its map of the arena, or wants none; blocks are as large as it says."""
        if self._arena is None:
            return
        self._arena.sent_out()
        frame_bytes = min(self._frame_bytes, welcome.max_frame_bytes)
        slots = Slots(self._arena, welcome.block_bytes, frame_bytes, self._protocol.inline)
        if slots.count == 0:
            text = f"arena_bytes: {self._arena.size} cannot hold one block of {welcome.block_bytes} bytes"
            raise TransferError("FAILED_PRECONDITION", text)
        self._slots = slots
        self._changed.notify_all()

    def _wait(self, done: Callable[[], bool], deadline: float, what: str) -> None:
        for pause in _pauses():
            if done():
                return
            left = deadline - self._clock.now()
            if left <= 0:
                raise TransferError("DEADLINE_EXCEEDED", what)
            self._changed.wait(min(left, pause))

    @contextmanager
    def _turn(self) -> Iterator[SenderProtocol]:
        """The protocol under the lock; then slots it gave back are free and futures it settled resolve."""
        ended: list[Outgoing] = []
        try:
            with self._changed:
                try:
                    yield self._protocol
                finally:
                    ended = self._collect()
        finally:
            for outgoing in ended:
                self._resolve(outgoing)

    def _collect(self) -> list[Outgoing]:
        self._free()
        ended, self._protocol.ended = self._protocol.ended, []
        self._changed.notify_all()
        return ended

    def _free(self) -> None:
        for slot in self._protocol.credits:
            if self._slots:
                self._slots.give(slot)
        self._protocol.credits.clear()

    def _resolve(self, outgoing: Outgoing) -> None:
        future = self._futures.pop(outgoing, None)
        if future is None:
            return
        if outgoing.error:
            future.set_exception(outgoing.error.fresh())
        else:
            future.set_result(None)


def _pauses() -> Iterator[float]:
    pause, longest = PAUSE_SECONDS
    while True:
        yield pause
        pause = min(2 * pause, longest)
