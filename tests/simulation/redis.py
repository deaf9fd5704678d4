"""The registry's Redis in a simulation: a real redis-server runs the real Lua, at simulated times.

    Store         the one real server, reached by a blocking socket; begins empty in every world
    Redis         a process of the world that serves it: it can be killed, started again, paused, cut off and emptied
    RedisClient   what a Registry asks of a connection, over the simulated network

A script runs when its message arrives, with the world's time in place of the server's own (`redis.call('TIME')`), and
stream entries are numbered. Nothing expires by the server's clock: keys written with an expiry stay.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, contextmanager
from hashlib import sha1
from itertools import count
from random import Random
from typing import Any, TypeAlias

import hiredis

from tandem.registry import RegistryUnavailable
from tandem.registry.errors import ScriptFailed
from tandem.registry.wire.connection import Entry, entries_of
from tandem.registry.wire.scripts import key_prefix, load_scripts
from tests.registry.wrong_values import VALUES, WrittenPlace, spoiling
from tests.simulation.network import SimulatedEnd, SimulatedNetwork
from tests.simulation.world import Occurrence, Process

ADDRESS = "redis:6379"
REPLY_WAIT_S = 10.0
# Unix time of the world's beginning.
EPOCH_S = 1_800_000_000.0
XADD, PUBLISH = 1, 2
# A script writes no more stream entries than this.
MAX_ENTRIES = 1000
# Around each script: its last arguments are the time and a number for stream entries; it says whether it wrote to a
# stream or a channel.
WRAPPED = """
local number, now_us = tonumber(table.remove(ARGV)), tonumber(table.remove(ARGV))
local seconds, rest = math.floor(now_us / 1000000), now_us % 1000000
local real, wrote = redis, 0
local redis = setmetatable({}, {__index = real})
function redis.call(command, ...)
  if command == 'TIME' then
    return {tostring(seconds), tostring(rest)}
  elseif command == 'PEXPIRE' then
    return 1
  elseif command == 'SET' and select('#', ...) == 4 then
    return real.call('SET', (...), (select(2, ...)))
  elseif command == 'SSCAN' then  -- a set is listed in an order that each redis-server draws anew
    local found = real.call('SSCAN', ...)
    table.sort(found[2])
    return found
  elseif command == 'PUBLISH' then
    wrote = bit.bor(wrote, 2)
    return 0
  elseif command == 'XADD' then
    wrote = bit.bor(wrote, 1)
    local arguments = {...}
    for i, argument in ipairs(arguments) do
      if argument == '*' then
        arguments[i] = string.format('%.0f-0', number)
        number = number + 1
        break
      end
    end
    return real.call('XADD', unpack(arguments))
  end
  return real.call(command, ...)
end
local function script()
SCRIPT
end
local reply = script()
if reply == nil then reply = false end
return {wrote, reply}
"""
Argument: TypeAlias = str | bytes | int | float


class RedisStore:
    """A blocking client of a real redis-server. Use as a context manager."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=REPLY_WAIT_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._shas: dict[str, str] = {}
        self._numbers = count(1)
        # A large hash would be listed in an order that each redis-server draws anew.
        for limit in ("hash-max-ziplist-value", "hash-max-ziplist-entries"):
            self.ask("CONFIG", "SET", limit, 1 << 16)
        for name, script in load_scripts().items():
            text = WRAPPED.replace("SCRIPT", script.text)
            self._shas[name] = sha1(text.encode()).hexdigest()
            self.ask("SCRIPT", "LOAD", text)

    def __enter__(self) -> RedisStore:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def begin(self) -> None:
        """As when it was new."""
        self._numbers = count(1)

    def empty(self) -> None:
        self.ask("FLUSHALL")

    def run(
        self, script: str, prefix: str, arguments: Sequence[Argument], now_us: int, binary: bool
    ) -> tuple[int, Any]:
        """Runs a command; returns the keys it wrote to (XADD, PUBLISH), and its reply."""
        number = next(self._numbers) * MAX_ENTRIES
        wrote, reply = self.ask("EVALSHA", self._shas[script], 1, prefix, *arguments, now_us, number, binary=binary)
        return wrote, reply

    def ask(self, *command: Argument, binary: bool = True) -> Any:
        reader = hiredis.Reader(encoding=None if binary else "utf-8", errors="replace")
        self._socket.sendall(hiredis.pack_command(tuple(command)))
        while (reply := reader.gets()) is False:
            data = self._socket.recv(1 << 16)
            if not data:
                raise ConnectionError("redis-server has closed the connection")
            reader.feed(data)
        if isinstance(reply, Exception):
            raise reply
        return reply


class SimulatedRedis:
    """Serves a store at ADDRESS. `start` after a kill is another process, with the memory it had or without."""

    def __init__(self, network: SimulatedNetwork, store: RedisStore) -> None:
        self.network = network
        self.process: Process
        # How long every command takes from now on.
        self.slowness_s = 0.0
        # How much its clock is ahead of the world's time.
        self.clock_offset_s = 0.0
        self._store = store
        self._subscribed: list[SimulatedEnd] = []
        self._waiting: list[_Read] = []
        # Streams, and behind which entry of them there was none when one was last written.
        self._nothing_new: set[tuple[str, str]] = set()
        store.begin()
        self.start(empty=True)

    def start(self, *, empty: bool) -> None:
        if empty:
            self._store.empty()
        self._subscribed, self._waiting = [], []
        self.process = self.network.world.process("redis")
        self.network.listen(self.process, ADDRESS, self._accept, pings=False)

    def empty(self) -> None:
        self._store.empty()

    def spoil(self, random: Random) -> str:
        """Overwrites a key, or a field of one, or takes it away; returns its name, empty where there is none."""
        if not (keys := sorted(self._store.ask("KEYS", "*"))):
            return ""
        key = random.choice(keys)
        fields = sorted(self._store.ask("HKEYS", key)) if (kind := self._store.ask("TYPE", key)) == b"hash" else ()
        place = WrittenPlace(key, kind, random.choice(fields) if fields and random.random() < 0.8 else None)
        for command in spoiling(place, random.choice(VALUES)):
            self._store.ask(*command)
        self._nothing_new.clear()
        return str(place)

    def _accept(self, end: SimulatedEnd) -> None:
        end.received = lambda frame: self._received(end, *frame)
        end.lost = lambda _: self._forget(end)

    def _forget(self, end: SimulatedEnd) -> None:
        self._subscribed = [other for other in self._subscribed if other is not end]
        self._waiting = [read for read in self._waiting if read.end is not end]

    def _received(self, end: SimulatedEnd, kind: str, number: int, *rest: Any) -> None:
        if self.slowness_s:
            self.process.call_later(self.slowness_s, self._answer, end, kind, number, *rest)
        else:
            self._answer(end, kind, number, *rest)

    def _answer(self, end: SimulatedEnd, kind: str, number: int, *rest: Any) -> None:
        try:
            if kind == "call":
                end.send((number, self._call(*rest)))
            elif kind == "read":
                _Read(self, end, number, *rest).begin()
            elif kind == "subscribe":
                self._subscribed.append(end)
                end.send((number, None))
            elif kind == "ping":
                end.send((number, None))
        except hiredis.ReplyError as error:
            end.send((number, error))

    def _call(self, script: str, prefix: str, arguments: Sequence[Argument], binary: bool) -> Any:
        now_us = round((EPOCH_S + self.network.world.now + self.clock_offset_s) * 1e6)
        wrote, reply = self._store.run(script, prefix, arguments, now_us, binary)
        if wrote & PUBLISH:
            for end in self._subscribed:
                end.send((0, None))
        if wrote & XADD:
            self._nothing_new.clear()
            for read in list(self._waiting):
                read.look_again()
        return reply

    def xread(self, stream: str, cursor: str, count: int) -> list[Entry]:
        if (stream, cursor) in self._nothing_new:
            return []
        entries = entries_of(self._store.ask("XREAD", "COUNT", count, "STREAMS", stream, cursor))
        if not entries:
            self._nothing_new.add((stream, cursor))
        return entries

    def wait(self, read: _Read, seconds: float) -> Occurrence:
        self._waiting.append(read)
        return self.network.world.after(seconds, self.process.deliver, read.give_up)

    def waits_no_longer(self, read: _Read) -> None:
        if read in self._waiting:
            self._waiting.remove(read)


class _Read:
    """An XREAD that may block."""

    def __init__(
        self, redis: SimulatedRedis, end: SimulatedEnd, number: int, stream: str, cursor: str, count: int, wait: float
    ) -> None:
        self.end = end
        self._redis = redis
        self._number = number
        self._what = stream, cursor, count
        self._wait = wait
        self._timeout: Occurrence | None = None

    def begin(self) -> None:
        if not self.look_again():
            if self._wait:
                self._timeout = self._redis.wait(self, self._wait)
            else:
                self._answer([])

    def look_again(self) -> bool:
        entries = self._redis.xread(*self._what)
        if entries:
            self._answer(entries)
        return bool(entries)

    def give_up(self) -> None:
        self._answer([])

    def _answer(self, entries: list[Entry]) -> None:
        if self._timeout:
            self._timeout.cancel()
        self._redis.waits_no_longer(self)
        self.end.send((self._number, entries))


class RedisClient:
    """A process's connection: every call within `timeout` seconds; opened when first needed, and again when lost."""

    def __init__(
        self, network: SimulatedNetwork, process: Process, namespace: str, timeout: float, client_id: str
    ) -> None:
        self.client_id = client_id
        self.lines = 0
        self._network = network
        self._process = process
        self._prefix = key_prefix(namespace)
        self._timeout = timeout
        self._end: SimulatedEnd | None = None
        self._opening: asyncio.Future[SimulatedEnd] | None = None
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._last = 0
        self._heard = 0.0
        self._pushed: set[Callable[[], None]] = set()

    async def call(self, name: str, *arguments: Argument, binary: bool = False) -> Any:
        return await self._ask("call", name, self._prefix, arguments, binary)

    async def read(self, stream: str, cursor: str, count: int, wait: float) -> list[Entry]:
        entries: list[Entry] = await self._ask(
            "read", self._prefix + stream, cursor, count, min(wait, self._timeout / 2)
        )
        return entries

    async def ping(self) -> None:
        await self._ask("ping")

    async def eviction_policy(self) -> str:
        return "noeviction"

    @asynccontextmanager
    async def changes(self) -> AsyncIterator[_RedisSubscription]:
        subscription = _RedisSubscription(self)
        self._pushed.add(subscription.push)
        try:
            await self._ask("subscribe")
            subscription.end = self._end
            yield subscription
        finally:
            self._pushed.discard(subscription.push)

    async def close(self) -> None:
        if self._end:
            self._end.close()
            self._lost("closed")

    def broke(self, end: SimulatedEnd | None) -> bool:
        return end is None or end is not self._end

    async def _ask(self, kind: str, *rest: Any) -> Any:
        began = self._process.time()
        with _translated(self._timeout):
            try:
                async with asyncio.timeout(self._timeout):
                    try:
                        return await self._ask_once(kind, *rest)
                    except ConnectionError:
                        # It died idle, or Redis restarts.
                        return await self._ask_once(kind, *rest)
            except TimeoutError:
                if self._end and self._heard < began:
                    self._end.abort()
                    self._lost("no answer")
                raise

    async def _ask_once(self, kind: str, *rest: Any) -> Any:
        end = await self._open()
        self._last += 1
        number = self._last
        future = self._asked[number] = self._process.create_future()
        try:
            end.send((kind, number, *rest))
            return await future
        finally:
            self._asked.pop(number, None)

    async def _open(self) -> SimulatedEnd:
        if self._end is not None:
            return self._end
        if self._opening is None:
            opening = self._opening = self._process.create_future()
            opening.add_done_callback(lambda done: done.cancelled() or done.exception())

            def connected(end: SimulatedEnd) -> None:
                self._opening = None
                if opening.done() or self._end is not None:  # another was quicker
                    end.close()
                    if not opening.done():
                        opening.set_result(self._end)
                    return
                self._end = end
                self.lines += 1
                end.received, end.lost = self._received, self._lost
                opening.set_result(end)

            def refused(reason: str) -> None:
                self._opening = None
                if not opening.done():
                    opening.set_exception(ConnectionError(reason))

            self._network.connect(self._process, ADDRESS, connected, refused)
        try:
            return await asyncio.shield(self._opening)
        except asyncio.CancelledError:
            self._opening = None  # it may never be answered
            raise

    def _received(self, frame: tuple[int, Any]) -> None:
        self._heard = self._process.time()
        number, reply = frame
        if number == 0:
            for push in list(self._pushed):
                push()
            return
        future = self._asked.get(number)
        if future is not None and not future.done():
            future.set_exception(reply) if isinstance(reply, Exception) else future.set_result(reply)

    def _lost(self, reason: str) -> None:
        self._end = None
        for future in self._asked.values():
            if not future.done():
                future.set_exception(ConnectionError(reason))
        for push in list(self._pushed):
            push()


class _RedisSubscription:
    def __init__(self, client: RedisClient) -> None:
        self.end: SimulatedEnd | None = None
        self._client = client
        self._news = asyncio.Event()

    def push(self) -> None:
        self._news.set()

    async def wait(self, timeout: float) -> bool:
        try:
            async with asyncio.timeout(timeout):
                await self._news.wait()
        except TimeoutError:
            return False
        self._news.clear()
        if self._client.broke(self.end):
            raise RegistryUnavailable("Redis: the subscription's connection was lost")
        return True


@contextmanager
def _translated(timeout: float) -> Any:
    try:
        yield
    except OSError as error:  # TimeoutError too
        raise RegistryUnavailable(f"Redis: {str(error) or f'no answer in {timeout} s'}") from error
    except hiredis.ReplyError as error:
        raise ScriptFailed(f"Redis: {error}") from error
