"""An OpenAI server of bytes: what a proxy that neither tokenizes nor detokenizes stands before."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast

from benchmarks.frontends.pace import BackendPace

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
HEALTHY = b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 15\r\n\r\n{"status":"ok"}'
DONE = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


def _event(letter: str, reason: str | None) -> bytes:
    choice = {"index": 0, "text": letter, "logprobs": None, "finish_reason": reason}
    said = {"id": "cmpl-0123456789abcdef", "created": 1, "model": "demo", "object": "text_completion"}
    event = b"data: " + json.dumps({**said, "choices": [choice]}, separators=(",", ":")).encode() + b"\n\n"
    return f"{len(event):x}\r\n".encode() + event + b"\r\n"


EVENTS = [_event(letter, None) for letter in "abcdefghijklmnopqrstuvwxyz"]
LAST = _event("z", "length") + DONE


class _Connection(asyncio.Protocol):
    def __init__(self, pace: BackendPace) -> None:
        self._pace = pace
        self._read = b""
        self._num_tokens = 0
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is none by its class

    def connection_lost(self, error: Exception | None) -> None:
        self._pace.end(self)

    def data_received(self, data: bytes) -> None:
        self._read += data
        head, end, body = self._read.partition(b"\r\n\r\n")
        length = next((int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")), 0)
        if not end or len(body) < length:
            return
        self._read = body[length:]
        assert self._transport is not None
        if not head.startswith(b"POST"):
            self._transport.write(HEALTHY)
            return
        asked = json.loads(body[:length])
        self._num_tokens = asked["max_tokens"]
        self._pace.begin(self, asked["seed"], self._num_tokens)

    def write(self, index: int) -> None:
        assert self._transport is not None
        event = LAST if index + 1 == self._num_tokens else EVENTS[index % len(EVENTS)]
        self._transport.write(HEAD + event if index == 0 else event)


@asynccontextmanager
async def byte_server(pace: BackendPace) -> AsyncIterator[int]:
    """Serving; yields its port."""
    server = await asyncio.get_running_loop().create_server(lambda: _Connection(pace), "127.0.0.1", 0, backlog=4096)
    stepping = asyncio.create_task(pace.run())
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        stepping.cancel()
        await asyncio.gather(stepping, return_exceptions=True)
        server.close()
