"""Sockets: the streams between two workers for every transport; with `tcp`, payloads travel in them too."""

from __future__ import annotations

import contextlib
import select
import socket
from collections.abc import Iterable

from tandem.hosts import address, listener
from tandem.transfer.protocol.wire import Bytes
from tandem.transfer.transports.base import ByteStream, Listener, Transport
from tandem.transfer.transports.host import InlineTransport


class SocketStream:
    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = sock
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self._waker.setblocking(False)
        self._poll = select.poll()
        self._poll.register(self._woken, select.POLLIN)

    def send(self, parts: Iterable[Bytes]) -> int:
        try:
            return self._socket.sendmsg(parts)
        except BlockingIOError:
            return 0

    def recv_into(self, view: memoryview) -> int:
        try:
            count = self._socket.recv_into(view)
        except BlockingIOError:
            return 0
        if count == 0:
            raise ConnectionResetError("closed by the peer")
        return count

    def wait(self, *, write: bool, timeout: float) -> None:
        self._poll.register(self._socket, select.POLLIN | (select.POLLOUT if write else 0))
        ready = self._poll.poll(max(0.0, timeout) * 1000)
        if any(fd == self._woken.fileno() for fd, _ in ready):
            with contextlib.suppress(BlockingIOError):
                self._woken.recv(4096)

    def wake(self) -> None:
        with contextlib.suppress(OSError):  # full: a wake is pending; closed: no thread waits
            self._waker.send(b"\0")

    def close(self) -> None:
        for sock in (self._socket, self._woken, self._waker):
            sock.close()


class SocketListener:
    def __init__(self, host: str, port: int, buffer_bytes: int) -> None:
        self._socket = listener(host, port, backlog=128)
        self._socket.setblocking(False)
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)
        _set_buffers(self._socket, buffer_bytes)
        name, bound = self._socket.getsockname()[:2]
        self.address = address(name, bound)

    def accept(self) -> ByteStream | None:
        try:
            return SocketStream(self._socket.accept()[0])
        except BlockingIOError:
            return None

    def wait(self, timeout: float) -> None:
        self._poll.poll(max(0.0, timeout) * 1000)

    def close(self) -> None:
        self._socket.close()


class SocketNetwork:
    """A network of TCP sockets. buffer_bytes: the kernel's buffer to ask for in each direction; it may grant less."""

    def __init__(self, buffer_bytes: int = 4 << 20) -> None:
        self._buffer_bytes = buffer_bytes

    def inline(self) -> Transport:
        return InlineTransport("tcp")

    def listen(self, host: str, port: int) -> Listener:
        return SocketListener(host, port, self._buffer_bytes)

    def dial(self, address: str, timeout: float) -> ByteStream:
        host, _, port = address.rpartition(":")
        if not port.isdigit():
            raise OSError(f"address {address!r} is not host:port")
        sock = socket.create_connection((host.strip("[]"), int(port)), timeout)
        _set_buffers(sock, self._buffer_bytes)
        return SocketStream(sock)


def _set_buffers(sock: socket.socket, size: int) -> None:
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        sock.setsockopt(socket.SOL_SOCKET, option, size)
