"""A network that damages what a sender writes, at the place a test asks for, and is true otherwise."""

from __future__ import annotations

import os
from collections.abc import Iterable

from tandem.transfer import Network
from tandem.transfer.protocol.wire import HEADER_BYTES, INLINE, Bytes, Kind, LinkMessage, parse_header
from tandem.transfer.transports.base import ByteStream, Listener
from tests.transfer import fake_nccl
from tests.transfer.toy import buffers


class TamperingStream:
    """Flips one bit of the first frame's header or payload, or of the first commit's payload."""

    def __init__(self, stream: ByteStream, target: list[str]) -> None:
        self._stream, self._target = stream, target
        self.recv_into, self.wait, self.wake, self.close = stream.recv_into, stream.wait, stream.wake, stream.close

    def send(self, parts: Iterable[Bytes]) -> int:
        views = [memoryview(part) for part in parts]
        for place, view in enumerate(views):
            if self._target and len(view) >= HEADER_BYTES and bytes(view[:4]) == b"TDKV":
                self._tamper(views, place)
        return self._stream.send(views)

    def _tamper(self, parts: list[memoryview], place: int) -> None:
        message, target = parse_header(parts[place]), self._target[0]
        if message.kind != (Kind.COMMIT if target == "commit" else Kind.FRAME):
            return
        self._target.clear()
        if target == "header":
            parts[place] = flipped(parts[place], 20)
        elif message.offset == INLINE:
            parts[place + 1] = flipped(parts[place + 1], message.length // 2)
        else:
            damage_payload(message)


class TamperingNetwork:
    """`target`: put "header", "payload" or "commit" there to damage the next one of its kind."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self.inline = network.inline
        self.target: list[str] = []

    def listen(self, host: str, port: int) -> Listener:
        return self._network.listen(host, port)

    def dial(self, address: str, timeout: float) -> ByteStream:
        return TamperingStream(self._network.dial(address, timeout), self.target)


def flipped(data: memoryview, at: int) -> memoryview:
    damaged = bytearray(data)
    damaged[at] ^= 1
    return memoryview(damaged)


def damage_payload(message: LinkMessage) -> None:
    """Flips a bit of a payload that is not on the stream, behind everybody's back."""
    offset = message.offset + message.length // 2
    fds = [fd for fd in os.listdir("/proc/self/fd") if "memfd:tandem-kv" in _target(fd)]
    devices = [fd for fd in os.listdir("/proc/self/fd") if "memfd:fake-device" in _target(fd)]
    if buffers:
        next(iter(buffers.values())).view[offset] ^= 1
    elif files := devices or fds:
        for file in {os.fstat(int(fd)).st_ino: int(fd) for fd in files}.values():  # each link's memory, once
            byte = os.pread(file, 1, offset)
            os.pwrite(file, bytes([byte[0] ^ 1]), offset)
    else:
        fake_nccl.damage_next.append("payload")


def _target(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except FileNotFoundError:
        return ""
