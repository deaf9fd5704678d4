"""Redis for a simulation: a real redis-server runs the registry's real scripts, at a time that the simulation says.

    call      latency, then the script, run at once on the loop's thread, then latency; an end of waiting between them
              leaves a script not run, or run with its answer lost
    read      what a stream has; where it has nothing, woken when a script adds to it
    changes   woken when a script publishes

The scripts are as in production, behind a few lines that shadow `redis`: TIME says what is passed with each call, and
nothing expires by the server's own clock (what is written with an expiry stays), so a run does not depend on how long
it really takes. Waiting is for futures of whichever loop asks: all of them have to share one thread.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any

from hiredis import Reader, pack_command

from tandem.registry import RegistryUnavailable
from tandem.registry.address import RedisAddress
from tandem.registry.connection import Changes, Entry, entries_of
from tandem.registry.scripts import key_prefix, load_scripts
from tandem.registry.wire import Argument, ReplyError

PRELUDE = """
local redis = (function(server)
  local prefix, time = KEYS[1], {KEYS[2], KEYS[3]}
  local function call(name, ...)
    if name == 'TIME' then return time end
    if name == 'PEXPIRE' then return 1 end
    if name == 'PUBLISH' then return server.call('INCR', prefix .. 'published') end
    if name == 'SET' and select('#', ...) == 4 then return server.call('SET', (...), (select(2, ...))) end
    if name == 'XADD' then server.call('INCR', prefix .. 'added') end
    return server.call(name, ...)
  end
  return setmetatable({call = call}, {__index = server})
end)(redis)
"""
LIMIT_S = 10.0


class SimulatedRedis:
    """One registry on the server at `url`. Use as a context manager.

    Args:
        now: the simulation's time in seconds.
    """

    def __init__(self, url: str, namespace: str, now: Callable[[], float]) -> None:
        self._address = RedisAddress.parse(url)
        self._prefix = key_prefix(namespace)
        self._now = now
        self._scripts = load_scripts(PRELUDE)
        self._loaded: set[str] = set()
        self._waiting: list[asyncio.Future[None]] = []
        self._seen: list[bytes | None] = [None, None]
        self.num_published = 0
        self.num_starts = 0
        self.up = True

    def __enter__(self) -> SimulatedRedis:
        self._socket = socket.create_connection((self._address.host, self._address.port), timeout=LIMIT_S)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._forget()
        self._socket.close()

    def stop(self) -> None:
        """From now on nobody reaches it."""
        self.up = False
        self._wake()

    def start(self, *, empty: bool = True) -> None:
        """It is back, without its memory or with it."""
        if empty:
            self._forget()
        self.num_starts += 1
        self.up = True

    def connection(self, client_id: str, latency_s: Callable[[], float]) -> SimulatedConnection:
        """For one process. `latency_s` is called for each way of a call."""
        return SimulatedConnection(self, client_id, latency_s)

    # --- for connections ---

    def run(self, name: str, arguments: tuple[Argument, ...], binary: bool) -> Any:
        script, micros = self._scripts[name], round(self._now() * 1e6)
        command = ("EVALSHA", script.sha) if name in self._loaded else ("EVAL", script.text)
        keys = 3, self._prefix, micros // 1_000_000, micros % 1_000_000
        counters = "MGET", f"{self._prefix}published", f"{self._prefix}added"
        answer, seen = self._ask((*command, *keys, *arguments), counters, texts=not binary)
        self._loaded.add(name)
        if seen != self._seen:
            self.num_published += seen[0] != self._seen[0]
            self._seen = seen
            self._wake()
        return answer

    def read(self, stream: str, cursor: str, count: int) -> list[Entry]:
        (reply,) = self._ask(("XREAD", "COUNT", count, "STREAMS", self._prefix + stream, cursor), texts=False)
        return entries_of(reply)

    async def woken(self, seconds: float) -> None:
        """When a script has added or published something, or the server stopped, or after so many seconds."""
        future = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        await asyncio.wait({future}, timeout=seconds)

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)

    def _forget(self) -> None:
        (keys,) = self._ask(("KEYS", self._prefix.replace("{", "[{]").replace("}", "[}]") + "*"))
        if keys:
            self._ask(("UNLINK", *keys))
        self._seen = [None, None]

    def _ask(self, *commands: tuple[Argument, ...], texts: bool = True) -> list[Any]:
        self._socket.sendall(b"".join(pack_command(command) for command in commands))  # type: ignore[arg-type]
        reader = Reader(encoding="utf-8", replyError=ReplyError, notEnoughData=self)
        replies: list[Any] = []
        while len(replies) < len(commands):
            if (reply := reader.gets(texts)) is self:
                reader.feed(self._socket.recv(1 << 20))
            else:
                replies.append(reply)
        for reply in replies:
            if isinstance(reply, ReplyError):
                raise reply
        return replies


class SimulatedConnection:
    """A tandem.registry Connection."""

    def __init__(self, redis: SimulatedRedis, client_id: str, latency_s: Callable[[], float]) -> None:
        self.client_id = client_id
        self._redis = redis
        self._latency_s = latency_s

    async def call(self, name: str, *arguments: Argument, binary: bool = False) -> Any:
        await self._travel()
        answer = self._redis.run(name, arguments, binary)
        await self._travel()
        return answer

    async def read(self, stream: str, cursor: str, count: int, wait: float) -> list[Entry]:
        now = asyncio.get_running_loop().time
        end = now() + wait
        await self._travel()
        while not (entries := self._redis.read(stream, cursor, count)) and (left := end - now()) > 0:
            await self._redis.woken(left)
            self._check()
        await self._travel()
        return entries

    async def ping(self) -> None:
        await self._travel()

    @asynccontextmanager
    async def changes(self) -> AsyncIterator[Changes]:
        await self._travel()
        yield _Subscription(self._redis, self)

    async def close(self) -> None:
        pass

    async def _travel(self) -> None:
        await asyncio.sleep(self._latency_s())
        self._check()

    def _check(self) -> None:
        if not self._redis.up:
            raise RegistryUnavailable("Redis of the simulation is stopped")


class _Subscription:
    def __init__(self, redis: SimulatedRedis, connection: SimulatedConnection) -> None:
        self._redis = redis
        self._connection = connection
        self._start, self._seen = redis.num_starts, redis.num_published

    async def wait(self, timeout: float) -> bool:
        now = asyncio.get_running_loop().time
        end = now() + timeout
        while self._redis.num_published == self._seen and (left := end - now()) > 0:
            await self._redis.woken(left)
            self._check()
        await self._connection._travel()
        self._check()
        changed, self._seen = self._redis.num_published != self._seen, self._redis.num_published
        return changed

    def _check(self) -> None:
        self._connection._check()
        if self._redis.num_starts != self._start:
            raise RegistryUnavailable("Redis of the simulation was started again")
