"""KV links over the simulated network: streams of bytes for tandem.transfer, stepped by its process's own loop.

Bytes arrive whole and in order, as over TCP, unless `spoil` says otherwise: it sees each message on its way out and
returns what becomes of it, with the seconds that it comes late.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from tandem.transfer.protocol.wire import HEADER_BYTES, Bytes, parse_header
from tandem.transfer.transports.base import ByteStream, Listener, Transport
from tandem.transfer.transports.host import InlineTransport
from tests.simulation.network import SimulatedEnd, SimulatedNetwork
from tests.simulation.world import Process

Spoil = Callable[[bytes], list[tuple[float, bytes]]]


class KVNetwork:
    """The network with which one process listens and dials."""

    def __init__(self, network: SimulatedNetwork, process: Process, spoil: Spoil | None = None) -> None:
        self.network = network
        self.process = process
        self.spoil = spoil

    def inline(self) -> Transport:
        return InlineTransport("memory")

    def listen(self, host: str, port: int) -> Listener:
        return _Listener(self, f"{host}:{port}")

    def dial(self, address: str, timeout: float) -> ByteStream:
        stream = _Stream(self)
        self.network.connect(self.process, address, stream.connected, stream.lost)
        return stream


class _Listener:
    def __init__(self, kv: KVNetwork, address: str) -> None:
        self._kv = kv
        self._waiting: deque[ByteStream] = deque()
        self._watchers: list[Callable[[], None]] = []
        self.address = kv.network.listen(kv.process, address, self._arrived, pings=False)

    def accept(self) -> ByteStream | None:
        return self._waiting.popleft() if self._waiting else None

    def wait(self, timeout: float) -> None:
        raise AssertionError("a loop waits for nothing")

    def watch(self, ready: Callable[[], None]) -> None:
        self._watchers.append(ready)

    def close(self) -> None:
        self._kv.network.unlisten(self.address)
        while self._waiting:
            self._waiting.popleft().close()

    def _arrived(self, end: SimulatedEnd) -> None:
        stream = _Stream(self._kv)
        stream.connected(end)
        self._waiting.append(stream)
        for ready in self._watchers:
            ready()


class _Stream:
    def __init__(self, kv: KVNetwork) -> None:
        self._kv = kv
        self._end: SimulatedEnd | None = None
        self._arrived: deque[memoryview] = deque()
        self._error: OSError | None = None
        self._watchers: list[Callable[[], None]] = []

    def connected(self, end: SimulatedEnd) -> None:
        if self._error:
            end.close()
            return
        self._end = end
        end.received, end.lost = self._received, self.lost
        self._changed()

    def lost(self, reason: str) -> None:
        self._error = ConnectionResetError(reason)
        self._changed()

    def send(self, parts: Iterable[Bytes]) -> int:
        if self._end is None:
            if self._error:
                raise self._error
            return 0
        if self._error:
            raise self._error
        data = b"".join(parts)
        for late_s, message in self._spoiled(data):
            if late_s:
                self._kv.network.world.after(late_s, self._end.send, message)
            else:
                self._end.send(message)
        return len(data)

    def recv_into(self, view: memoryview) -> int:
        if not self._arrived:
            if self._error:
                raise self._error
            return 0
        chunk = self._arrived[0]
        count = min(len(chunk), len(view))
        view[:count] = chunk[:count]
        self._arrived[0] = chunk[count:]
        if count == len(chunk):
            self._arrived.popleft()
        return count

    def wait(self, *, write: bool, timeout: float) -> None:
        raise AssertionError("a loop waits for nothing")

    def wake(self) -> None:
        self._changed()

    def watch(self, ready: Callable[[], None]) -> None:
        self._watchers.append(ready)

    def close(self) -> None:
        self._error = self._error or ConnectionResetError("closed here")
        if self._end:
            self._end.close()

    def _received(self, data: bytes) -> None:
        self._arrived.append(memoryview(data))
        self._changed()

    def _changed(self) -> None:
        for ready in self._watchers:
            ready()

    def _spoiled(self, data: bytes) -> Iterable[tuple[float, bytes]]:
        if self._kv.spoil is None:
            yield 0.0, data
            return
        while data:
            message = parse_header(data)
            size = HEADER_BYTES + message.inline_bytes
            yield from self._kv.spoil(data[:size])
            data = data[size:]
