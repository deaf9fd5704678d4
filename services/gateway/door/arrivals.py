"""How long ago a request arrived: the kernel received it in time, however late this process runs.

scope's client ──> sock_diag: the one connection with these two addresses ──> ms since data last came on it

The kernel is asked over netlink because the sockets are the server's, in Rust: `getsockopt` would need a search through
all descriptors for each request, and /proc/net/tcp does not have the time.
"""

from __future__ import annotations

import socket
import struct
from contextlib import suppress
from functools import lru_cache

# struct tcp_info: 8 bytes, then 32-bit numbers. The 10th is the age of the last data sent, the 12th of that received.
TCP_INFO = struct.Struct("=8B16I")
SINCE_SENT, SINCE_CAME = 8 + 9, 8 + 11
# linux/sock_diag.h, linux/inet_diag.h
NETLINK_SOCK_DIAG, SOCK_DIAG_BY_FAMILY, REQUEST = 4, 20, 1
INET_DIAG_INFO = 2
ANY_STATE = NO_COOKIE = 0xFFFFFFFF
HEADER = struct.Struct("=IHHII")
ASKED = struct.Struct("=BBBxI")  # family, protocol, what to tell, states
SOCKET = struct.Struct("!HH16s16s")  # ports and addresses, own first
NO_INTERFACE = struct.pack("=III", 0, NO_COOKIE, NO_COOKIE)
FOUND = struct.Struct("=4B")
FOUND_BYTES = 72
ATTRIBUTE = struct.Struct("=HH")
MAX_ANSWER = 4096


class Arrivals:
    """The arrival times of one port's requests; 0 s ago where the kernel does not report them."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._kernel: socket.socket | None = None
        with suppress(AttributeError, OSError):
            kind = socket.SOCK_RAW | socket.SOCK_NONBLOCK
            self._kernel = socket.socket(socket.AF_NETLINK, kind, NETLINK_SOCK_DIAG)

    def since_s(self, client: tuple[str, str | int]) -> float:
        """Returns the seconds since this client's last data arrived; 0 if unknown."""
        if self._kernel is None:
            return 0.0
        try:
            self._kernel.send(_question(client[0], int(client[1]), self._port))
            return _since_ms(self._kernel.recv(MAX_ANSWER), int(client[1])) / 1000
        except (OSError, ValueError, struct.error):
            return 0.0

    def close(self) -> None:
        if self._kernel is not None:
            self._kernel.close()
            self._kernel = None


def _question(host: str, port: int, own_port: int) -> bytes:
    family = _family(host)
    ends = SOCKET.pack(own_port, port, socket.inet_pton(family, _own(host)), socket.inet_pton(family, host))
    asked = ASKED.pack(family, socket.IPPROTO_TCP, 1 << (INET_DIAG_INFO - 1), ANY_STATE) + ends + NO_INTERFACE
    return HEADER.pack(HEADER.size + len(asked), SOCK_DIAG_BY_FAMILY, REQUEST, 0, 0) + asked


def _since_ms(answer: bytes, port: int) -> int:
    """Returns the milliseconds in an answer of the kernel; 0 if it describes another socket, such as a listener."""
    size, kind, *_ = HEADER.unpack_from(answer)
    at = HEADER.size + FOUND.size
    if kind != SOCK_DIAG_BY_FAMILY or SOCKET.unpack_from(answer, at)[1] != port:
        return 0
    at = HEADER.size + FOUND_BYTES
    while at < size:
        length, what = ATTRIBUTE.unpack_from(answer, at)
        if what == INET_DIAG_INFO:
            return int(TCP_INFO.unpack_from(answer, at + ATTRIBUTE.size)[SINCE_CAME])
        at += max(ATTRIBUTE.size, (length + 3) & ~3)
    return 0


@lru_cache(maxsize=4096)
def _own(host: str) -> str:
    """Returns the local address of a connection to `host`."""
    with socket.socket(_family(host), socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing
        return str(probe.getsockname()[0])


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
