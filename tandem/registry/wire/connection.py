"""The registry's use of Redis, and Redis itself: scripts called by hash, a channel, every failure one error.

call      EVALSHA, one round trip; EVAL where the server does not know the script yet (first call, or it restarted);
          all on one wire, one behind the other, for none of them waits in the server
read      what a stream has behind a cursor, or what comes next: on a wire of its own, for it may wait
changes   a subscription on a connection of its own; a message only says "look again"
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

# Of a stream: its id and its fields.
Entry: TypeAlias = tuple[str, dict[bytes, bytes]]
# These pass, or an operator has to mend them: the server starts, moves, is full or read-only, or knows no such user.
UNAVAILABLE = frozenset(
    {
        "LOADING", "READONLY", "OOM", "MISCONF", "BUSY", "CLUSTERDOWN", "TRYAGAIN", "MASTERDOWN", "NOAUTH",
        "WRONGPASS", "NOPERM", "NOREPLICAS",
    }
)  # fmt: skip
# The same from within a script, by older servers only as text.
REFUSALS = ("-OOM ", "-READONLY ", "-MISCONF ")


class Changes(Protocol):
    """A subscription. Messages that arrived together count as one."""

    async def wait(self, timeout: float) -> bool:
        """True as soon as something changed, False after `timeout` seconds without.

        Raises:
            RegistryUnavailable: the connection broke; changes may have been missed.
        """


class RegistryConnection(Protocol):
    """Every call may raise RegistryUnavailable: Redis did not answer; the script may have run all the same."""

    client_id: str
    """Unique among all clients that the registry ever has."""

    @property
    def lines(self) -> int:
        """How often calls have got a new line to Redis. A call that sees this change may have been sent twice, and what
        went out on the older line may still arrive, behind anything that is called later."""

    async def call(self, name: str, *arguments: Argument, binary: bool = False) -> Any:
        """Run one script. Strings in the answer are bytes where `binary`."""

    async def read(self, stream: str, cursor: str, count: int, wait: float) -> list[Entry]:
        """At most `count` entries behind `cursor`, oldest first; if there are none yet, the next that come within
        `wait` seconds or sooner, or none."""

    async def ping(self) -> None: ...

    async def eviction_policy(self) -> str:
        """Redis's `maxmemory-policy`; empty where it does not say."""

    def changes(self) -> AbstractAsyncContextManager[Changes]:
        """Listen on the channel `changed`."""

    async def close(self) -> None: ...


class RedisConnection:
    """Wires to one Redis and the scripts run there, each call within `timeout` seconds. `close` ends it."""

    def __init__(self, url: str, namespace: str, timeout: float, number: int = FORMAT) -> None:
        """Connects when first used. `number`: of the keys' format.

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
        block = ("BLOCK", wait_ms) if wait_ms else ()  # BLOCK 0 is for ever
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
        """One line of INFO; empty where there is none, or this user may not ask."""
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
                if "READONLY" in str(error):  # no master any more: another is where the address leads now
                    wire.renew("read-only")
                raise

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:  # TimeoutError too
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
    """Entries of one stream in a reply to XREAD."""
    entries = reply[0][1] if reply else ()
    return [(entry_id.decode(), dict(zip(flat[::2], flat[1::2], strict=True))) for entry_id, flat in entries]
