"""A running end of a link: a task, stepped by a driver, that carries messages between the stream and the end.

    each step  read a few messages and hand them to the end -> write the end's messages -> tick when due
               -> idle once nothing has moved for `patience` seconds: until the stream is ready, another thread wakes
                  it, or something is due
    the end    by the end of the stream, a dead peer, a bad message or `close`: `closed` is called exactly once

Messages are read and written in bursts: on a busy link a thread switch costs more than the message. For the same reason
a thread that queues a small message writes it too, one thread at a time.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol, runtime_checkable

from tandem.liveness import Liveness
from tandem.transfer.protocol.endpoint import TransferError
from tandem.transfer.protocol.wire import LinkMessage
from tandem.transfer.runtime.driver import Driver, Running
from tandem.transfer.runtime.reader import Reader
from tandem.transfer.transports.base import ByteStream

TICK_SECONDS = 0.05
POLL_SECONDS = 1e-4
READ_BURST = 8
WRITE_BURST_MESSAGES = 32
WRITE_BURST_BYTES = 256 << 10


class End(Protocol):
    """The protocol of one side, as a connection uses it.

    The driver's thread calls all methods; threads that `flush` also call `pending`, `take` and `sent`. A TransferError
    ends the link.

    patience: seconds to keep looking for messages after one has come, before the connection sleeps. poll_s: the most
    seconds to sleep, if something is under way whose end wakes no thread.
    """

    liveness: Liveness
    max_frame_bytes: int
    patience: float

    @property
    def poll_s(self) -> float: ...

    @property
    def under_way(self) -> bool:
        """True while a deadline other than that of a silent peer may expire."""

    @property
    def small(self) -> bool:
        """True if messages are so small that writing one costs less than waking a thread."""

    def pending(self) -> bool:
        """True if `take` would return something."""

    def take(self) -> list[LinkMessage]:
        """Removes and returns the next messages to write."""

    def sent(self, messages: list[LinkMessage]) -> None: ...
    def receive(self, message: LinkMessage) -> None: ...
    def resume(self) -> bool:
        """Retries blocked work. Returns True if anything progressed."""

    def tick(self) -> None: ...
    def closed(self, error: TransferError) -> None: ...


@runtime_checkable
class Watched(Protocol):
    """A stream or a listener that notifies an event loop when it may be ready."""

    def watch(self, ready: Callable[[], None]) -> None: ...


def burst(outbox: deque[LinkMessage]) -> list[LinkMessage]:
    """Removes and returns the messages of `outbox` to write in one call of the stream."""
    taken: list[LinkMessage] = []
    size = 0
    while outbox and outbox[0].ready and len(taken) < WRITE_BURST_MESSAGES and size < WRITE_BURST_BYTES:
        taken.append(outbox.popleft())
        size += taken[-1].inline_bytes
    return taken


class Connection:
    """A task that serves `end` over the stream that `dial` makes in the first step; `dial` may raise TransferError or
    OSError."""

    def __init__(self, dial: Callable[[], ByteStream], end: End, driver: Driver, name: str) -> None:
        self.name = name
        self._dial, self._end, self._driver = dial, end, driver
        self._stream: ByteStream | None = None
        self._running: Running | None = None
        self._closing: TransferError | None = None
        self._writing: list[LinkMessage] = []
        self._parts: deque[memoryview] = deque()
        self._tick_at = self._moved_at = 0.0
        self._asleep = False
        self._writer = threading.Lock()  # held by the thread that writes
        self._over = False

    def start(self) -> None:
        self._running = self._driver.start(self)

    @property
    def alive(self) -> bool:
        return self._running is not None and self._running.alive and self._closing is None and not self._over

    def flush(self) -> None:
        """Announces new messages of the end, from any thread. Small messages are written immediately, by this thread.

        Messages that cannot be written without waiting, and any failure, are left to the driver.
        """
        if self._end.small or not self._driver.concurrent:
            with suppress(OSError, TransferError):
                while self._end.pending() and self._write():
                    pass
        if self._asleep and (self._parts or self._end.pending()):
            self._asleep = False
            self._wake()

    def close(self, error: TransferError) -> None:
        """Has the driver end the link soon, with this error."""
        self._closing = self._closing or error
        self._wake()

    def join(self) -> None:
        """Waits, after `close`, until the connection has ended."""
        if self._running:
            self._running.join()

    def step(self) -> float | None:
        if self._over:
            return None
        try:
            if self._closing is None:
                return self._turn()
            with self._writer:
                while self._stream and self._write_some(self._stream):  # write what needs no waiting, such as an ABORT
                    pass
            error = self._closing
        except TransferError as why:
            error = why
        except OSError as why:
            error = TransferError("UNAVAILABLE", f"link lost: {why}")
        except Exception as why:
            error = TransferError("UNAVAILABLE", f"link died: {why!r}")
        self._finish(error)
        return None

    def idle(self) -> bool:
        self._asleep = True  # set before the last check: a thread that queues a message later wakes us
        return self._blocked or not self._end.pending()

    def wait(self, timeout: float) -> None:
        if self._stream:
            writing = bool(self._parts) and not self._writer.locked()
            self._stream.wait(write=writing, timeout=timeout)
        self._asleep = False

    def watch(self, ready: Callable[[], None]) -> None:
        if not isinstance(self._stream, Watched):
            raise TypeError(f"an event loop cannot watch {self._stream!r}: use a MemoryNetwork")
        self._stream.watch(ready)

    @property
    def _blocked(self) -> bool:
        """True if the stream is full, or if another thread writes, which wakes us if it leaves something."""
        return bool(self._parts) or self._writer.locked()

    def _wake(self) -> None:
        if self._stream:
            self._stream.wake()

    def _finish(self, error: TransferError) -> None:
        with self._writer:
            self._over = True
            if self._stream:
                self._stream.close()
            self._writing.clear()  # messages may keep a side's memory alive
            self._parts.clear()
        self._end.closed(error.fresh())

    def _turn(self) -> float:
        self._asleep = False
        if self._stream is None:
            self._stream = self._dial()
            self._reader = Reader(self._stream, self._end.max_frame_bytes)
        moved = self._read()
        moved = self._end.resume() or moved
        moved = self._write() or moved
        now = self._driver.now()
        if now >= self._tick_at:
            self._end.tick()
            self._tick_at = math.inf
        due_s = TICK_SECONDS if self._end.under_way else self._end.liveness.due_s(now)
        self._tick_at = min(self._tick_at, now + due_s)
        if moved:
            self._moved_at = now
        if moved or (self._driver.concurrent and now - self._moved_at < self._end.patience):
            return 0.0
        return min(self._tick_at - now, self._end.poll_s)

    def _read(self) -> bool:
        for count in range(READ_BURST):
            message = self._reader.next()
            if self._reader.heard:
                self._end.liveness.heard_at = self._driver.now()
                self._reader.heard = False
            if message is None:
                return count > 0
            self._end.receive(message)
        return True

    def _write(self) -> bool:
        """Writes queued messages; True if some bytes went.

        False while another thread writes: that thread looks again.
        """
        if self._stream is None or not self._writer.acquire(blocking=False):
            return False
        try:
            return not self._over and self._write_some(self._stream)
        finally:
            self._writer.release()

    def _write_some(self, stream: ByteStream) -> bool:
        if not self._writing:
            self._writing = self._end.take()
            for message in self._writing:
                self._parts.append(memoryview(message.header()))
                if message.inline_bytes:
                    self._parts.append(memoryview(message.body))
        if not self._writing:
            return False
        count = stream.send(self._parts)
        self._skip(count)
        if not self._parts:
            done, self._writing = self._writing, []
            self._end.sent(done)
        return count > 0

    def _skip(self, count: int) -> None:
        while self._parts and count >= len(self._parts[0]):
            count -= len(self._parts.popleft())
        if count:
            self._parts[0] = self._parts[0][count:]
