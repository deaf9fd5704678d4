"""A peer of wire version 5, written from what that version's headers are, over a plain socket."""

from __future__ import annotations

import json
import socket
import struct
from dataclasses import dataclass
from typing import Any

from xxhash import xxh3_64_intdigest

HEADER = struct.Struct("<4sBBxxQQIIIIQQ")
INLINE = 2**64 - 1
HELLO, WELCOME, PROBE, PROBE_ACK, BEGIN, FRAME, COMMIT, ACK, PING = 1, 2, 4, 5, 6, 7, 8, 10, 12


@dataclass(frozen=True)
class OldMessage:
    kind: int
    nonce: int
    handle: int
    place: tuple[int, int, int]  # layer, first block, blocks
    body: bytes


class Version5:
    """`stream` is connected. Whatever it reads that is not of version 5 fails the test."""

    def __init__(self, stream: socket.socket) -> None:
        self._stream = stream
        self.nonce = 0
        stream.settimeout(10.0)

    def say(
        self, kind: int, body: bytes | dict[str, Any] = b"", handle: int = 0, place: tuple[int, int, int] = (0, 0, 0)
    ) -> None:
        data = json.dumps(body).encode() if isinstance(body, dict) else body
        fields = HEADER.pack(
            b"TDKV", 5, kind, self.nonce, handle, *place, len(data), INLINE, xxh3_64_intdigest(data)
        )  # fmt: skip
        self._stream.sendall(fields + struct.pack("<Q", xxh3_64_intdigest(fields)) + data)

    def hear(self) -> OldMessage:
        """The next message that is no PING."""
        while True:
            fields, told = self._read(HEADER.size), struct.unpack("<Q", self._read(8))[0]
            magic, version, kind, nonce, handle, *place, length, offset, payload_sum = HEADER.unpack(fields)
            assert (magic, version, offset, told) == (b"TDKV", 5, INLINE, xxh3_64_intdigest(fields))
            body = self._read(length)
            assert payload_sum == xxh3_64_intdigest(body)
            if kind != PING:
                return OldMessage(kind, nonce, handle, (place[0], place[1], place[2]), body)

    def agree(self, sender: str, receiver: str, sender_nonce: int, receiver_nonce: int) -> None:
        """On the nonce of a link between these incarnations."""
        self.nonce = xxh3_64_intdigest("\0".join((sender, receiver, str(sender_nonce), str(receiver_nonce))).encode())

    def _read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            more = self._stream.recv(size - len(data))
            assert more, f"the peer hung up after {len(data)} of {size} bytes"
            data += more
        return data
