"""The thread of one end of a link: it alone touches the stream, and carries messages between it and a port.

each turn  write what the port has to say -> read at most one message and hand it over -> tick
           -> sleep if neither moved, until the stream is ready, somebody wakes it, or something falls due
the end    of the stream, of the peer's life, by a bad message or by `close`: the port hears of it exactly once
"""

from __future__ import annotations

import threading
from typing import Protocol

import numpy as np

from tandem.clock import Clock
from tandem.transfer.endpoint import TransferError
from tandem.transfer.liveness import Liveness
from tandem.transfer.stream import Stream
from tandem.transfer.wire import HEADER_BYTES, MAX_CONTROL_BYTES, PAYLOAD_KINDS, Message, parse_header

JOIN_SECONDS = 5.0


class Port(Protocol):
    """What a channel serves. Every call comes from the channel's thread; a TransferError ends the link."""

    liveness: Liveness
    max_frame_bytes: int

    def take(self) -> Message | None:
        """The next message to write."""

    def sent(self, message: Message) -> None: ...
    def receive(self, message: Message) -> None: ...
    def tick(self) -> None: ...
    def closed(self, error: TransferError) -> None: ...


class Channel:
    def __init__(self, stream: Stream, port: Port, clock: Clock, name: str) -> None:
        self._stream, self._port, self._clock = stream, port, clock
        self._closing: TransferError | None = None
        self._writing: Message | None = None
        self._parts: list[memoryview] = []
        self._header = memoryview(bytearray(HEADER_BYTES))
        self._body = memoryview(b"")
        self._buffer = np.empty(0, np.uint8)
        self._reading: Message | None = None
        self._filled = 0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def wake(self) -> None:
        """From any thread: the port has something to write."""
        self._stream.wake()

    def close(self, error: TransferError) -> None:
        """Ends the link for this reason and waits, at most JOIN_SECONDS, until its thread has gone."""
        self._closing = self._closing or error
        self._stream.wake()
        if self._thread is not threading.current_thread():
            self._thread.join(JOIN_SECONDS)

    def _run(self) -> None:
        try:
            while self._closing is None:
                self._turn()
            error = self._closing
        except TransferError as why:
            error = why
        except OSError as why:
            error = TransferError("UNAVAILABLE", f"link lost: {why}")
        except Exception as why:
            error = TransferError("UNAVAILABLE", f"link thread died: {why!r}")
        self._stream.close()
        self._writing, self._parts, self._reading = None, [], None  # they may hold on to an arena
        self._port.closed(error)

    def _turn(self) -> None:
        moved = self._write()
        moved = self._read() or moved
        self._port.tick()
        if not moved:
            timeout = self._port.liveness.next_at() - self._clock.now()
            self._stream.wait(write=bool(self._parts), timeout=min(timeout, 0.1))

    def _write(self) -> bool:
        if self._writing is None:
            self._writing = self._port.take()
            if self._writing is None:
                return False
            body = memoryview(self._writing.body)
            self._parts = [memoryview(self._writing.header()), *([body] if body else [])]
        count = self._stream.send(self._parts)
        self._skip(count)
        if not self._parts:
            done, self._writing = self._writing, None
            self._port.sent(done)
        return count > 0

    def _skip(self, count: int) -> None:
        while self._parts and count >= len(self._parts[0]):
            count -= len(self._parts.pop(0))
        if count:
            self._parts[0] = self._parts[0][count:]

    def _read(self) -> bool:
        if self._reading is None:
            if not self._fill(self._header):
                return False
            self._reading = parse_header(self._header)
            self._body, self._filled = self._room(self._reading), 0
        if not self._fill(self._body):
            return False
        message, self._reading, self._filled = self._reading, None, 0
        message.body = self._body
        self._port.receive(message)
        return True

    def _fill(self, view: memoryview) -> bool:
        """Reads on into `view`; whether it is full."""
        while self._filled < len(view):
            count = self._stream.recv_into(view[self._filled :])
            if count == 0:
                return False
            self._filled += count
            self._port.liveness.heard_at = self._clock.now()
        return True

    def _room(self, message: Message) -> memoryview:
        """Where the body goes: memory kept from message to message, as large as the largest so far."""
        size = message.inline_bytes
        limit = self._port.max_frame_bytes if message.kind in PAYLOAD_KINDS else MAX_CONTROL_BYTES
        if size > limit:
            raise TransferError("DATA_LOSS", f"{message.kind.name} announces {size} bytes, at most {limit} are allowed")
        if size > len(self._buffer):
            self._buffer = np.empty(size, np.uint8)
        return self._buffer[:size].data
