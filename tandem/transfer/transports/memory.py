"""A network inside one process, in place of sockets: two bounded byte pipes a connection, no descriptor, no host.

Threads wait for a stream; an event loop watches it instead.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable

from tandem.transfer.protocol.wire import Bytes
from tandem.transfer.transports.base import ByteStream, Listener, Transport
from tandem.transfer.transports.host import InlineTransport

PIPE_BYTES = 1 << 20


class _Changed:
    """A signal of changes: wakes waiting threads and calls watchers."""

    def __init__(self) -> None:
        self.lock = threading.Condition()
        self.watchers: list[Callable[[], None]] = []

    def notify(self) -> None:
        with self.lock:
            self.lock.notify_all()
        for watcher in self.watchers:
            watcher()


class _Pipe:
    """Bytes in one direction, in order; an empty chunk is the end. `changed` is shared with the other direction."""

    def __init__(self, changed: _Changed) -> None:
        self.changed = changed
        self.chunks: deque[memoryview] = deque()
        self.closed = False
        self._free = PIPE_BYTES

    @property
    def has_room(self) -> bool:
        return self._free > 0

    def send(self, parts: Iterable[Bytes]) -> int:
        with self.changed.lock:
            if self.closed:
                raise BrokenPipeError("closed by the peer")
            data = b"".join(parts)[: self._free]
            self._free -= len(data)
            if data:
                self.chunks.append(memoryview(data))
        self.changed.notify()
        return len(data)

    def recv_into(self, view: memoryview) -> int:
        with self.changed.lock:
            if not self.chunks:
                return 0
            chunk = self.chunks[0]
            if not chunk:
                raise ConnectionResetError("closed by the peer")
            count = min(len(chunk), len(view))
            view[:count] = chunk[:count]
            self.chunks[0] = chunk[count:]
            if count == len(chunk):
                self.chunks.popleft()
            self._free += count
        self.changed.notify()
        return count

    def close(self) -> None:
        """Closes the pipe for its sender; bytes sent before can still be read."""
        with self.changed.lock:
            if not self.closed:
                self.closed = True
                self.chunks.append(memoryview(b""))
        self.changed.notify()


class MemoryStream:
    def __init__(self, incoming: _Pipe, outgoing: _Pipe) -> None:
        self._in, self._out = incoming, outgoing
        self._changed = incoming.changed
        self._woken = False

    def send(self, parts: Iterable[Bytes]) -> int:
        return self._out.send(parts)

    def recv_into(self, view: memoryview) -> int:
        return self._in.recv_into(view)

    def wait(self, *, write: bool, timeout: float) -> None:
        def ready() -> bool:
            return bool(self._woken or self._in.chunks or (write and self._out.has_room))

        with self._changed.lock:
            self._changed.lock.wait_for(ready, max(0.0, timeout))
            self._woken = False

    def wake(self) -> None:
        self._woken = True
        self._changed.notify()

    def watch(self, ready: Callable[[], None]) -> None:
        """Has `ready` called whenever something may have changed."""
        self._changed.watchers.append(ready)

    def close(self) -> None:
        self._out.close()


class MemoryListener:
    def __init__(self, network: MemoryNetwork, address: str) -> None:
        self.address = address
        self._network = network
        self._waiting: deque[MemoryStream] = deque()
        self._changed = _Changed()

    def accept(self) -> ByteStream | None:
        with self._changed.lock:
            return self._waiting.popleft() if self._waiting else None

    def wait(self, timeout: float) -> None:
        with self._changed.lock:
            self._changed.lock.wait_for(lambda: bool(self._waiting), timeout)

    def watch(self, ready: Callable[[], None]) -> None:
        self._changed.watchers.append(ready)

    def connect(self) -> ByteStream:
        changed = _Changed()
        there, back = _Pipe(changed), _Pipe(changed)
        with self._changed.lock:
            self._waiting.append(MemoryStream(there, back))
        self._changed.notify()
        return MemoryStream(back, there)

    def close(self) -> None:
        self._network.forget(self.address)
        while (stream := self.accept()) is not None:
            stream.close()


class MemoryNetwork:
    """A network of senders and receivers that were given the same MemoryNetwork."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listeners: dict[str, MemoryListener] = {}
        self._next_port = 1

    def inline(self) -> Transport:
        return InlineTransport("memory")

    def listen(self, host: str, port: int) -> Listener:
        with self._lock:
            if not port:
                port, self._next_port = self._next_port, self._next_port + 1
            address = f"{host}:{port}"
            if address in self._listeners:
                raise OSError(f"{address} is in use")
            self._listeners[address] = MemoryListener(self, address)
            return self._listeners[address]

    def dial(self, address: str, timeout: float) -> ByteStream:
        with self._lock:
            listener = self._listeners.get(address)
        if listener is None:
            raise ConnectionRefusedError(f"nothing listens at {address}")
        return listener.connect()

    def forget(self, address: str) -> None:
        with self._lock:
            self._listeners.pop(address, None)
