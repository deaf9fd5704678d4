"""Reading messages from a stream: many headers at a time through a small buffer, large bodies straight to memory."""

from __future__ import annotations

import numpy as np

from tandem.transfer.protocol.endpoint import TransferError
from tandem.transfer.protocol.wire import (
    HEADER_BYTES,
    MAX_CONTROL_BYTES,
    PAYLOAD_KINDS,
    LinkMessage,
    parse_header,
)
from tandem.transfer.transports.base import ByteStream

STAGE_BYTES = 16 << 10


class Reader:
    """Reads messages.

    `heard` becomes True when a byte has come. max_frame_bytes: the largest inline payload allowed.
    """

    def __init__(self, stream: ByteStream, max_frame_bytes: int) -> None:
        self.heard = False
        self._stream, self._max_frame_bytes = stream, max_frame_bytes
        self._stage = memoryview(bytearray(STAGE_BYTES))
        self._start = self._end = 0  # the bounds of staged bytes not used yet
        self._memory = np.empty(0, np.uint8)
        self._message: LinkMessage | None = None
        self._body = memoryview(b"")
        self._filled = 0

    def next(self) -> LinkMessage | None:
        """Returns the next whole message, or None if its bytes have not come yet.

        Its body is valid until the next call.

        Raises OSError if the peer is gone, TransferError if the stream cannot be followed any more.
        """
        if self._message is None:
            if not self._stages(HEADER_BYTES):
                return None
            self._message = parse_header(self._stage[self._start : self._start + HEADER_BYTES])
            self._start += HEADER_BYTES
            self._body, self._filled = self._memory_for(self._message), 0
        if not self._fill_body():
            return None
        message, self._message = self._message, None
        message.body = self._body
        return message

    def _stages(self, size: int) -> bool:
        while self._end - self._start < size:
            if not self._refill():
                return False
        return True

    def _refill(self) -> bool:
        left = self._end - self._start
        if left:
            self._stage[:left] = bytes(self._stage[self._start : self._end])
        self._start, self._end = 0, left
        count = self._receive(self._stage[left:])
        self._end += count
        return count > 0

    def _fill_body(self) -> bool:
        size = len(self._body)
        if staged := min(size - self._filled, self._end - self._start):
            self._body[self._filled : self._filled + staged] = self._stage[self._start : self._start + staged]
            self._start += staged
            self._filled += staged
        while self._filled < size:
            count = self._receive(self._body[self._filled :])
            if count == 0:
                return False
            self._filled += count
        return True

    def _receive(self, view: memoryview) -> int:
        count = self._stream.recv_into(view)
        self.heard = self.heard or count > 0
        return count

    def _memory_for(self, message: LinkMessage) -> memoryview:
        """Returns memory for the message's body.

        It is reused for later messages. Raises TransferError for too large a one.
        """
        size = message.inline_bytes
        limit = self._max_frame_bytes if message.kind in PAYLOAD_KINDS else MAX_CONTROL_BYTES
        if size > limit:
            raise TransferError("DATA_LOSS", f"{message.kind.name} announces {size} bytes, at most {limit} are allowed")
        if size > len(self._memory):
            self._memory = np.empty(size, np.uint8)
        return self._memory[:size].data
