"""A connection to Redis with pipelining: commands are sent immediately, and replies come back in the same order.

    ask ──> pack, write ─────────> Redis
    ask ──> pack, write ─────────>
             waiting: ask, ask <── replies, in order

The reply of a caller that was cancelled is read and dropped. If nothing arrives within a caller's timeout, the
connection ends, and every call that waits there is sent once more on the next connection; so is a call that meets a
connection which died idle. So commands must be safe to run twice.

hiredis packs commands and parses replies. A general client on top of it costs three times as much per call.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

from hiredis import ProtocolError, Reader, pack_command

from tandem.registry.wire.address import RedisAddress

Argument: TypeAlias = str | bytes | int
_MORE = object()


class ConnectionLost(OSError):
    """The connection ended before the reply came."""


class ReplyError(Exception):
    """Redis answered with an error; the message begins with its code."""

    @property
    def code(self) -> str:
        return str(self).partition(" ")[0]


class Wire:
    """A line to Redis that connects at first use, and again after its connection ended. `close` ends it."""

    def __init__(self, open_line: Callable[[], Awaitable[RespConnection]]) -> None:
        self.lines = 0  # connections opened so far
        self._open_line = open_line
        self._line: RespConnection | None = None
        self._connecting = asyncio.Lock()
        self._closed = False

    async def ask(self, *command: Argument, binary: bool = False) -> Any:
        """Returns the reply to a command. `binary`: strings in it are bytes. A caller that times out calls `doubt`.

        Raises:
            ReplyError: Redis refuses.
            OSError: Redis cannot be reached.
        """
        try:
            return await (await self._connected()).ask(command, binary)
        except ConnectionLost:
            # The connection died idle, or Redis restarts.
            return await (await self._connected()).ask(command, binary)

    def doubt(self, since: float) -> None:
        """Ends the connection if nothing was received since then (the loop's time)."""
        if self._line and self._line.heard < since:
            self.renew("no answer")

    def renew(self, why: str) -> None:
        """Ends the connection. Its waiting calls, and all later ones, use a new connection."""
        if self._line:
            self._line.end(why)

    def close(self) -> None:
        self._closed = True
        self.renew("closed")

    async def _connected(self) -> RespConnection:
        if self._line and not self._line.ended:
            return self._line
        async with self._connecting:
            if self._closed:
                raise ConnectionLost("closed")
            if self._line is None or self._line.ended:
                self._line = await self._open_line()
                self.lines += 1
        return self._line


class RespConnection(asyncio.Protocol):
    """A connection, from its handshake until `end`. `on_push` is called for each message that answers no command
    (on a subscribed channel), and when the connection ends.
    """

    def __init__(self, on_push: Callable[[], None]) -> None:
        self.ended = ""  # why the connection ended; empty: it is open
        self.heard = 0.0
        self._on_push = on_push
        self._waiting: deque[tuple[asyncio.Future[Any], bool]] = deque()
        self._loop = asyncio.get_running_loop()
        self._replies = Reader(encoding="utf-8", errors="replace", replyError=ReplyError, notEnoughData=_MORE)
        self._transport: asyncio.Transport | None = None

    @classmethod
    async def open(cls, address: RedisAddress, on_push: Callable[[], None] = lambda: None) -> RespConnection:
        """Opens a connection.

        Raises:
            ReplyError: user, password or database are refused.
            OSError: Redis cannot be reached.
        """
        loop = asyncio.get_running_loop()
        if address.path:
            _, line = await loop.create_unix_connection(lambda: cls(on_push), address.path)
        else:
            tls = address.tls_context()
            _, line = await loop.create_connection(lambda: cls(on_push), address.host, address.port, ssl=tls)
        try:
            for command in address.handshake():
                await line.ask(command, binary=False)
        except BaseException:
            line.end("handshake failed")
            raise
        return line

    async def ask(self, command: tuple[Argument, ...], binary: bool) -> Any:
        if self.ended or self._transport is None:
            raise ConnectionLost(self.ended)
        reply: asyncio.Future[Any] = self._loop.create_future()
        self._waiting.append((reply, binary))
        self._transport.write(pack_command(command))  # type: ignore[arg-type]
        return await reply

    def end(self, why: str) -> None:
        if self.ended:
            return
        self.ended = why
        if self._transport:
            self._transport.abort()
        for reply, _ in self._waiting:
            if not reply.done():
                reply.set_exception(ConnectionLost(why))
        self._waiting.clear()
        self._on_push()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        self.heard = self._loop.time()
        try:
            self._replies.feed(data)
            while self._take_next():
                pass
        except ProtocolError as error:
            self.end(str(error))

    def connection_lost(self, error: Exception | None) -> None:
        self.end(str(error or "Redis closed the connection"))

    def _take_next(self) -> bool:
        """Takes the next reply. Returns False if it has not fully arrived yet."""
        waiting, binary = self._waiting[0] if self._waiting else (None, True)
        reply = self._replies.gets(not binary)
        if reply is _MORE:
            return False
        if waiting is None:
            self._on_push()
            return True
        self._waiting.popleft()
        if not waiting.done():
            waiting.set_exception(reply) if isinstance(reply, Exception) else waiting.set_result(reply)
        return True
