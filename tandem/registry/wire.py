"""A connection to Redis on which commands go out as they come, and answers come back in their order.

    ask ──> pack, write ─────────> Redis
    ask ──> pack, write ─────────>
             waiting: ask, ask <── answers, in order

Whoever goes away leaves its place: its answer is read and dropped. Where nothing comes within a caller's time the
connection ends, and every call that waits there, or meets a connection that died idle, is sent once more on the next.
So what is sent must bear being run twice.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any, TypeAlias

from hiredis import ProtocolError, Reader, pack_command
from redis.asyncio import Connection as Link
from redis.asyncio import ConnectionPool
from redis.exceptions import ConnectionError as ConnectionLost

Argument: TypeAlias = str | bytes | int


_MORE = object()


class Wire:
    """Connects when first used, and again after that connection ended. `close` ends it."""

    def __init__(self, pool: ConnectionPool) -> None:
        """The pool only says how to connect."""
        self._pool = pool
        self._line: _Line | None = None
        self._connecting = asyncio.Lock()
        self._closed = False

    async def ask(self, *command: Argument, binary: bool = False) -> Any:
        """The answer; strings in it are bytes where `binary`. Whoever waits no longer says so by `doubt`.

        Raises:
            redis.exceptions.RedisError: Redis refuses, or cannot be reached.
            OSError
        """
        try:
            return await (await self._connected()).ask(command, binary)
        except ConnectionLost:
            # It died idle, or Redis restarts.
            return await (await self._connected()).ask(command, binary)

    def doubt(self, since: float) -> None:
        """Ends the connection if nothing came since then (the loop's time)."""
        if self._line and self._line.heard < since:
            self._line.end("no answer")

    def close(self) -> None:
        self._closed = True
        if self._line:
            self._line.end("closed")

    async def _connected(self) -> _Line:
        if self._line and not self._line.ended:
            return self._line
        async with self._connecting:
            if self._closed:
                raise ConnectionLost("closed")
            if self._line is None or self._line.ended:
                link: Link = self._pool.make_connection()  # type: ignore[no-untyped-call]
                await link.connect()  # type: ignore[no-untyped-call]
                self._line = _Line(link)
        return self._line


class _Line(asyncio.Protocol):
    """Takes the socket over from redis-py, which has connected it."""

    def __init__(self, link: Link) -> None:
        self.ended = ""  # why
        self.heard = 0.0
        self._waiting: deque[tuple[asyncio.Future[Any], bool]] = deque()
        self._loop = asyncio.get_running_loop()
        self._answers = Reader(encoding="utf-8", replyError=link._parser.parse_error, notEnoughData=_MORE)
        self._writer, link._writer, link._reader = link._writer, None, None  # it closes what it lets go of
        assert self._writer is not None
        self._transport: asyncio.Transport = self._writer.transport  # type: ignore[assignment]
        self._transport.set_protocol(self)

    async def ask(self, command: tuple[Argument, ...], binary: bool) -> Any:
        if self.ended:
            raise ConnectionLost(self.ended)
        answer: asyncio.Future[Any] = self._loop.create_future()
        self._waiting.append((answer, binary))
        self._transport.write(pack_command(command))  # type: ignore[arg-type]
        return await answer

    def end(self, why: str) -> None:
        if self.ended:
            return
        self.ended = why
        self._transport.abort()
        for answer, _ in self._waiting:
            if not answer.done():
                answer.set_exception(ConnectionLost(why))
        self._waiting.clear()

    def data_received(self, data: bytes) -> None:
        self.heard = self._loop.time()
        try:
            self._answers.feed(data)
            while self._waiting and self._answer_next():
                pass
        except ProtocolError as error:
            self.end(str(error))

    def connection_lost(self, error: Exception | None) -> None:
        self.end(str(error or "Redis closed the connection"))

    def _answer_next(self) -> bool:
        """False until the next answer is here whole."""
        waiting, binary = self._waiting[0]
        answer = self._answers.gets(not binary)
        if answer is _MORE:
            return False
        self._waiting.popleft()
        if not waiting.done():
            waiting.set_exception(answer) if isinstance(answer, Exception) else waiting.set_result(answer)
        return True
