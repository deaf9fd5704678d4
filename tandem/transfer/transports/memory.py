"""A network inside one process, the peer of sockets: two bounded byte pipes a connection, no descriptor, no host."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable

from tandem.transfer.protocol.wire import Bytes
from tandem.transfer.transports.tcp import Listener, Stream

PIPE_BYTES = 1 << 20


class _Pipe:
    """Bytes one way. `changed` is shared with the pipe of the other way."""

    def __init__(self, changed: threading.Condition) -> None:
        self.changed = changed
        self.chunks: deque[memoryview] = deque()
        self.held = 0
        self.closed = False


class MemoryStream:
    def __init__(self, incoming: _Pipe, outgoing: _Pipe) -> None:
        self._in, self._out = incoming, outgoing
        self._changed = incoming.changed
        self._woken = False

    def send(self, parts: Iterable[Bytes]) -> int:
        with self._changed:
            if self._out.closed:
                raise BrokenPipeError("closed by the peer")
            data = b"".join(parts)[: PIPE_BYTES - self._out.held]
            if data:
                self._out.chunks.append(memoryview(data))
                self._out.held += len(data)
                self._changed.notify_all()
            return len(data)

    def recv_into(self, view: memoryview) -> int:
        with self._changed:
            if not self._in.chunks:
                if self._in.closed:
                    raise ConnectionResetError("closed by the peer")
                return 0
            chunk = self._in.chunks[0]
            count = min(len(chunk), len(view))
            view[:count] = chunk[:count]
            self._in.chunks[0] = chunk[count:]
            if count == len(chunk):
                self._in.chunks.popleft()
            self._in.held -= count
            self._changed.notify_all()
            return count

    def wait(self, *, write: bool, timeout: float) -> None:
        def ready() -> bool:
            room = write and self._out.held < PIPE_BYTES
            return bool(self._woken or self._in.chunks or self._in.closed or self._out.closed or room)

        with self._changed:
            self._changed.wait_for(ready, max(0.0, timeout))
            self._woken = False

    def wake(self) -> None:
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._in.closed = self._out.closed = True
            self._changed.notify_all()


class MemoryListener:
    def __init__(self, network: MemoryNetwork, address: str) -> None:
        self.address = address
        self._network = network
        self._waiting: deque[Stream] = deque()
        self._changed = threading.Condition()

    def accept(self, timeout: float) -> Stream | None:
        with self._changed:
            self._changed.wait_for(lambda: bool(self._waiting), timeout)
            return self._waiting.popleft() if self._waiting else None

    def connect(self) -> Stream:
        changed = threading.Condition()
        there, back = _Pipe(changed), _Pipe(changed)
        with self._changed:
            self._waiting.append(MemoryStream(there, back))
            self._changed.notify_all()
        return MemoryStream(back, there)

    def close(self) -> None:
        self._network.forget(self.address)
        with self._changed:
            while self._waiting:
                self._waiting.popleft().close()


class MemoryNetwork:
    """Hand one of these to the senders and the receivers that shall meet."""

    carries = frozenset({"memory"})

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listeners: dict[str, MemoryListener] = {}
        self._next_port = 1

    def listen(self, host: str, port: int) -> Listener:
        with self._lock:
            if not port:
                port, self._next_port = self._next_port, self._next_port + 1
            address = f"{host}:{port}"
            if address in self._listeners:
                raise OSError(f"{address} is in use")
            self._listeners[address] = MemoryListener(self, address)
            return self._listeners[address]

    def dial(self, address: str, timeout: float) -> Stream:
        with self._lock:
            listener = self._listeners.get(address)
        if listener is None:
            raise ConnectionRefusedError(f"nobody listens at {address}")
        return listener.connect()

    def forget(self, address: str) -> None:
        with self._lock:
            self._listeners.pop(address, None)
