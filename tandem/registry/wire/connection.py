"""The registry's connection to Redis: calls of scripts by hash, reads of streams, a channel, and one error.

call      EVALSHA, one round trip; EVAL where the server does not know the script yet (first call, or it restarted);
          all share one wire, in order, as no call waits in the server
read      a stream's entries after a cursor, or the next ones: on a wire of its own, as a read may wait in the server
changes   a subscription on a connection of its own; a message only means "look again"
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from typing import Any, Protocol, TypeAlias
from uuid import uuid4

from tandem.registry.errors import RegistryUnavailable, ScriptFailed
from tandem.registry.wire.address import RedisAddress
from tandem.registry.wire.master import Master
from tandem.registry.wire.resp import Argument, ConnectionLost, ReplyError, RespConnection, Wire
from tandem.registry.wire.scripts import FORMAT, Script, key_prefix, load_scripts

# An entry of a stream: its id and its fields.
Entry: TypeAlias = tuple[str, dict[bytes, bytes]]
# Errors that pass, or that an operator has to fix: the server starts, moves, is full or read-only, or denies the user.
UNAVAILABLE = frozenset(
    {
        "LOADING", "READONLY", "OOM", "MISCONF", "BUSY", "CLUSTERDOWN", "TRYAGAIN", "MASTERDOWN", "NOAUTH",
        "WRONGPASS", "NOPERM", "NOREPLICAS",
    }
)  # fmt: skip
# The same errors from within a script, of which older servers return only the text.
REFUSALS = ("-OOM ", "-READONLY ", "-MISCONF ")


class Changes(Protocol):
    """A subscription. Messages that arrive together count as one."""

    async def wait(self, timeout: float) -> bool:
        """Waits for a change. Returns True as soon as there is one, False after `timeout` seconds.

        Raises:
            RegistryUnavailable: the connection broke; changes may have been missed.
        """


class RegistryConnection(Protocol):
    """A connection to Redis.

    Calls may raise RegistryUnavailable if Redis did not answer; the script may still have run.
    """

    client_id: str
    """Unique among all clients that the registry ever has."""

    @property
    def lines(self) -> int:
        """The number of connections opened for calls so far. If it changes during a call, the call may have been sent
        twice, and its first copy may still arrive, even after later calls.
        """

    async def call(self, name: str, *arguments: Argument, binary: bool = False) -> Any:
        """Runs one script and returns its answer. `binary`: strings in the answer are bytes."""

    async def read(self, stream: str, cursor: str, count: int, wait: float) -> list[Entry]:
        """Returns at most `count` entries after `cursor`, oldest first. Without any, waits for entries at most `wait`
        seconds, perhaps less, and may return none.
        """

    async def ping(self) -> None: ...

    async def eviction_policy(self) -> str:
        """Returns Redis's `maxmemory-policy`; empty if Redis does not report it."""

    def changes(self) -> AbstractAsyncContextManager[Changes]:
        """Subscribes to the channel `changed`."""

    async def close(self) -> None: ...


class RedisConnection:
    """Wires to one Redis, and the scripts to run there.

    Each call ends within `timeout` seconds. `close` ends the wires.
    """

    def __init__(self, url: str, namespace: str, timeout: float, number: int = FORMAT) -> None:
        """Makes a connection that connects at first use. `number`: the format of its keys.

        Raises:
            ValueError: the URL or the namespace is malformed.
        """
        if timeout <= 0:
            raise ValueError(f"timeout must be above 0 seconds, got {timeout}")
        self.client_id = uuid4().hex[:12]
        self._address = RedisAddress.parse(url)
        self._prefix = key_prefix(namespace, number)
        self._timeout = timeout
        self._scripts = load_scripts()
        self._master = Master(self._address)
        self._calls, self._reads = Wire(self._master.open), Wire(self._master.open)

    @property
    def lines(self) -> int:
        return self._calls.lines

    async def call(self, name: str, *arguments: Argument, binary: bool = False) -> Any:
        return await self._bounded(self._calls, self._run(self._scripts[name], arguments, binary))

    async def read(self, stream: str, cursor: str, count: int, wait: float) -> list[Entry]:
        wait_ms = round(min(wait, self._timeout / 2) * 1000)
        block = ("BLOCK", wait_ms) if wait_ms else ()  # BLOCK 0 would wait for ever
        command = ("XREAD", "COUNT", count, *block, "STREAMS", self._prefix + stream, cursor)
        return entries_of(await self._bounded(self._reads, self._reads.ask(*command, binary=True)))

    async def ping(self) -> None:
        await self._bounded(self._calls, self._calls.ask("PING"))

    async def eviction_policy(self) -> str:
        return str(await self._bounded(self._calls, self._said_of_memory("maxmemory_policy")))

    @asynccontextmanager
    async def changes(self) -> AsyncIterator[Changes]:
        pushed = asyncio.Event()
        with self._translated():
            async with asyncio.timeout(self._timeout):
                line = await self._master.open(pushed.set)
                try:
                    await line.ask(("SUBSCRIBE", self._prefix + "changed"), binary=False)
                except BaseException:
                    line.end("not subscribed")
                    raise
        try:
            yield _Subscription(line, pushed, self)
        finally:
            line.end("closed")

    async def close(self) -> None:
        self._calls.close()
        self._reads.close()

    async def _said_of_memory(self, name: str) -> str:
        """Returns one value of INFO memory; empty if it is missing, or the user may not ask."""
        try:
            lines = str(await self._calls.ask("INFO", "memory")).splitlines()
        except ReplyError:
            return ""
        return next((line.partition(":")[2] for line in lines if line.startswith(f"{name}:")), "")

    async def _run(self, script: Script, arguments: tuple[Argument, ...], binary: bool) -> Any:
        try:
            return await self._calls.ask("EVALSHA", script.sha, 1, self._prefix, *arguments, binary=binary)
        except ReplyError as error:
            if error.code != "NOSCRIPT":
                raise
            return await self._calls.ask("EVAL", script.text, 1, self._prefix, *arguments, binary=binary)

    async def _bounded(self, wire: Wire, asking: Coroutine[Any, Any, Any]) -> Any:
        start = asyncio.get_running_loop().time()
        with self._translated():
            try:
                async with asyncio.timeout(self._timeout):
                    return await asking
            except TimeoutError:
                wire.doubt(start)
                raise
            except ReplyError as error:
                if "READONLY" in str(error):  # no longer the master: the address now leads to another
                    wire.renew("read-only")
                raise

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:  # includes TimeoutError
            reason = str(error) or f"no answer in {self._timeout} s"
            raise RegistryUnavailable(f"Redis at {self._address}: {reason}") from error
        except ReplyError as error:
            if error.code not in UNAVAILABLE and not any(refusal in str(error) for refusal in REFUSALS):
                raise ScriptFailed(f"Redis at {self._address}: {error}") from error
            raise RegistryUnavailable(f"Redis at {self._address} refuses: {error}") from error


class _Subscription:
    def __init__(self, line: RespConnection, pushed: asyncio.Event, connection: RedisConnection) -> None:
        self._line = line
        self._pushed = pushed
        self._connection = connection

    async def wait(self, timeout: float) -> bool:
        try:
            async with asyncio.timeout(timeout):
                await self._pushed.wait()
        except TimeoutError:
            return False
        self._pushed.clear()
        if self._line.ended:
            with self._connection._translated():
                raise ConnectionLost(self._line.ended)
        return True


def entries_of(reply: Any) -> list[Entry]:
    """Returns the entries of one stream in a reply to XREAD."""
    entries = reply[0][1] if reply else ()
    return [(entry_id.decode(), dict(zip(flat[::2], flat[1::2], strict=True))) for entry_id, flat in entries]
