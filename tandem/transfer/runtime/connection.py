"""The thread of one end of a link: it carries messages between the stream and a port, and alone reads and waits.

    each turn  read a few messages and hand them over -> write what the port has to say -> tick, now and then
               -> sleep if nothing has moved for as long as the port is patient: until the stream is ready, somebody
                  wakes it, or something falls due
    the end    of the stream, of the peer's life, by a bad message or by `close`: the port hears of it exactly once

Messages are read and written in bursts: on a busy link a thread switch costs more than the message. For the same reason
whoever queues a small message writes it too, one thread at a time.
"""

from __future__ import annotations

import threading
from collections import deque
from contextlib import suppress
from typing import Protocol

from tandem.clock import Clock
from tandem.transfer.protocol.endpoint import TransferError
from tandem.transfer.protocol.liveness import Liveness
from tandem.transfer.protocol.wire import Message
from tandem.transfer.runtime.reader import Reader
from tandem.transfer.transports.tcp import Stream

JOIN_SECONDS = 5.0
TICK_SECONDS = 0.05
READ_BURST = 8
WRITE_BURST_MESSAGES = 32
WRITE_BURST_BYTES = 256 << 10


class Port(Protocol):
    """What a channel serves. Every call comes from the channel's thread; a TransferError ends the link."""

    liveness: Liveness
    max_frame_bytes: int
    patience: float  # seconds to look for messages after one has come before the thread sleeps

    @property
    def small(self) -> bool:
        """Whether its messages are so small that writing one costs less than waking a thread."""

    def pending(self) -> bool:
        """Whether `take` would return something."""

    def take(self) -> list[Message]:
        """The next messages to write."""

    def sent(self, messages: list[Message]) -> None: ...
    def receive(self, message: Message) -> None: ...
    def tick(self) -> None: ...
    def closed(self, error: TransferError) -> None: ...


def burst(outbox: deque[Message]) -> list[Message]:
    """Takes from `outbox` what is worth one call of the stream."""
    taken: list[Message] = []
    size = 0
    while outbox and len(taken) < WRITE_BURST_MESSAGES and size < WRITE_BURST_BYTES:
        taken.append(outbox.popleft())
        size += taken[-1].inline_bytes
    return taken


class Channel:
    def __init__(self, stream: Stream, port: Port, clock: Clock, name: str) -> None:
        self._stream, self._port, self._clock = stream, port, clock
        self._reader = Reader(stream, port.max_frame_bytes)
        self._closing: TransferError | None = None
        self._writing: list[Message] = []
        self._parts: deque[memoryview] = deque()
        self._tick_at = self._moved_at = 0.0
        self._asleep = False
        self._writer = threading.Lock()  # whoever holds it writes
        self._over = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def flush(self) -> None:
        """From any thread: the port has something to write. Small messages are written here and now.

        What does not go without waiting, and any failure, is the channel's own thread's to find.
        """
        if self._port.small:
            with suppress(OSError, TransferError):
                while self._port.pending() and self._write():
                    pass
        if self._parts or self._port.pending():
            self._wake()

    def _wake(self) -> None:
        if self._asleep:
            self._asleep = False
            self._stream.wake()

    def close(self, error: TransferError) -> None:
        """Ends the link for this reason and waits, at most JOIN_SECONDS, until its thread has gone."""
        self._closing = self._closing or error
        self._stream.wake()
        if self._thread is not threading.current_thread():
            self._thread.join(JOIN_SECONDS)

    def _run(self) -> None:
        error = self._work()
        with self._writer:
            self._over = True
            self._stream.close()
            self._writing.clear()  # messages may hold on to an arena
            self._parts.clear()
        self._port.closed(error.fresh())

    def _work(self) -> TransferError:
        """Until the link ends; why it did."""
        try:
            while self._closing is None:
                self._turn()
            with self._writer:
                while self._write_some():  # as much as goes without waiting: an ABORT, say
                    pass
        except TransferError as why:
            return why
        except OSError as why:
            return TransferError("UNAVAILABLE", f"link lost: {why}")
        except Exception as why:
            return TransferError("UNAVAILABLE", f"link thread died: {why!r}")
        return self._closing

    def _turn(self) -> None:
        moved = self._read()
        moved = self._write() or moved
        now = self._clock.now()
        if now >= self._tick_at:
            self._port.tick()
            self._tick_at = now + TICK_SECONDS
        if moved:
            self._moved_at = now
        elif now - self._moved_at >= self._port.patience:
            self._sleep(now)

    def _sleep(self, now: float) -> None:
        self._asleep = True  # before the last look at the port: whoever queues a message after it will wake us
        elsewhere = self._writer.locked()  # another thread writes, and will wake us for what it leaves
        if elsewhere or self._parts or not self._port.pending():
            self._stream.wait(write=bool(self._parts) and not elsewhere, timeout=self._tick_at - now)
        self._asleep = False

    def _read(self) -> bool:
        for count in range(READ_BURST):
            message = self._reader.next()
            if self._reader.heard:
                self._port.liveness.heard_at = self._clock.now()
                self._reader.heard = False
            if message is None:
                return count > 0
            self._port.receive(message)
        return True

    def _write(self) -> bool:
        """Whether something was written. False also while another thread writes: it looks at the port again after."""
        if not self._writer.acquire(blocking=False):
            return False
        try:
            return not self._over and self._write_some()
        finally:
            self._writer.release()

    def _write_some(self) -> bool:
        if not self._writing:
            self._writing = self._port.take()
            for message in self._writing:
                self._parts.append(memoryview(message.header()))
                if message.inline_bytes:
                    self._parts.append(memoryview(message.body))
        if not self._writing:
            return False
        count = self._stream.send(self._parts)
        self._skip(count)
        if not self._parts:
            done, self._writing = self._writing, []
            self._port.sent(done)
        return count > 0

    def _skip(self, count: int) -> None:
        while self._parts and count >= len(self._parts[0]):
            count -= len(self._parts.popleft())
        if count:
            self._parts[0] = self._parts[0][count:]
