"""Redis itself: scripts called by hash, one channel listened to, every failure one error. The only file that knows it.

    call      EVALSHA, one round trip; EVAL where the server does not know the script yet (first call, or it restarted);
              all on one wire, one behind the other, for none of them waits in the server
    read      what a stream has behind a cursor, or what comes next: on a wire of its own, for it may wait
    changes   a subscription of its own connection; a message only says "look again"

redis-py connects: it knows of passwords, databases and TLS. What is called then goes past it (wire.py), at a third of
its cost. Every script takes the key prefix `{namespace}:` as its one key: the braces keep all keys of a cluster in one
slot.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from hashlib import sha1
from importlib.resources import files
from typing import Any, TypeAlias
from urllib.parse import urlsplit

from redis import exceptions
from redis.asyncio import ConnectionPool, Redis
from redis.asyncio.client import PubSub

from tandem.registry.errors import RegistryUnavailable
from tandem.registry.wire import Argument, Wire

# Of a stream: its id and its fields.
Entry: TypeAlias = tuple[str, dict[bytes, bytes]]
SCRIPTS = (
    "lease", "deregister", "workers", "select", "release", "abandon", "publish", "locate", "heads", "page", "sweep",
    "check",
)  # fmt: skip
# What scripts begin with: all of them; this one.
COMMON = ("keys", "rows", "ledger")
PARTS = {"select": ("costs", "expected")}
UNAVAILABLE = (
    exceptions.ConnectionError,
    exceptions.TimeoutError,
    exceptions.ReadOnlyError,
    exceptions.OutOfMemoryError,
    exceptions.ClusterDownError,
    exceptions.TryAgainError,
    OSError,  # TimeoutError too
)
# The same told from within a script, by older servers only as text.
REFUSALS = ("-OOM ", "-READONLY ", "-MISCONF ")


@dataclass(frozen=True, slots=True)
class Script:
    text: str
    sha: str


class Connection:
    """Wires to one Redis and the scripts run there. `close` ends it."""

    def __init__(self, url: str, namespace: str, timeout: float) -> None:
        """Connects when first used.

        Raises:
            ValueError: the URL or the namespace is malformed.
        """
        if not namespace or set(namespace) & set("{}"):
            raise ValueError(f"namespace must be a name without braces, got {namespace!r}")
        if timeout <= 0:
            raise ValueError(f"timeout must be above 0 seconds, got {timeout}")
        self._where = urlsplit(url).netloc.rpartition("@")[2] or url  # no password in messages
        self._prefix = f"{{{namespace}}}:"
        self._timeout = timeout
        self._scripts = {name: _load(name) for name in SCRIPTS}
        # No socket_timeout: every use below has its own, and redis-py's costs a task a call.
        self._pool = ConnectionPool.from_url(
            url, socket_timeout=None, socket_connect_timeout=timeout, decode_responses=True, protocol=2
        )
        self._calls, self._reads = Wire(self._pool), Wire(self._pool)

    async def call(self, name: str, *arguments: Argument, binary: bool = False) -> Any:
        """Run one script, within the timeout. Strings in the answer are bytes where `binary`.

        Raises:
            RegistryUnavailable: Redis did not answer; the script may have run all the same.
        """
        return await self._bounded(self._calls, self._run(self._scripts[name], arguments, binary))

    async def read(self, stream: str, cursor: str, count: int, wait: float) -> list[Entry]:
        """At most `count` entries behind `cursor`, oldest first; if there are none yet, the next that come within
        `wait` seconds (and the timeout), or none.

        Raises:
            RegistryUnavailable
        """
        wait_ms = round(min(wait, self._timeout / 2) * 1000)
        block = ("BLOCK", wait_ms) if wait_ms else ()  # BLOCK 0 is for ever
        command = ("XREAD", "COUNT", count, *block, "STREAMS", self._prefix + stream, cursor)
        found = await self._bounded(self._reads, self._reads.ask(*command, binary=True))
        entries = found[0][1] if found else ()
        return [(entry_id.decode(), dict(zip(flat[::2], flat[1::2], strict=True))) for entry_id, flat in entries]

    async def ping(self) -> None:
        await self._bounded(self._calls, self._calls.ask("PING"))

    @asynccontextmanager
    async def changes(self) -> AsyncIterator[Changes]:
        """Listen on the channel `changed`."""
        pubsub = Redis(connection_pool=self._pool).pubsub(ignore_subscribe_messages=True)
        try:
            with self._translated():
                async with asyncio.timeout(self._timeout):
                    await pubsub.subscribe(self._prefix + "changed")
            yield Changes(pubsub, self)
        finally:
            await pubsub.aclose()  # type: ignore[no-untyped-call]

    async def close(self) -> None:
        self._calls.close()
        self._reads.close()
        await self._pool.aclose()

    async def _run(self, script: Script, arguments: tuple[Argument, ...], binary: bool) -> Any:
        try:
            return await self._calls.ask("EVALSHA", script.sha, 1, self._prefix, *arguments, binary=binary)
        except exceptions.NoScriptError:
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

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except UNAVAILABLE as error:
            reason = str(error) or f"no answer in {self._timeout} s"
            raise RegistryUnavailable(f"Redis at {self._where}: {reason}") from error
        except exceptions.ResponseError as error:
            if not any(refusal in str(error) for refusal in REFUSALS):
                raise
            raise RegistryUnavailable(f"Redis at {self._where} refuses writes: {error}") from error


class Changes:
    """A subscription. Messages that arrived together count as one."""

    def __init__(self, pubsub: PubSub, connection: Connection) -> None:
        self._pubsub = pubsub
        self._connection = connection

    async def wait(self, timeout: float) -> bool:
        """True as soon as something changed, False after `timeout` seconds without.

        Raises:
            RegistryUnavailable: the connection broke; changes may have been missed.
        """
        if not await self._message(timeout):
            return False
        while await self._message(0):
            pass
        return True

    async def _message(self, timeout: float) -> bool:
        with self._connection._translated():
            async with asyncio.timeout(timeout + self._connection._timeout):
                return bool(await self._pubsub.get_message(timeout=timeout))


def _load(name: str) -> Script:
    folder = files(__package__) / "lua"
    text = "".join((folder / f"{part}.lua").read_text() for part in (*COMMON, *PARTS.get(name, ()), name))
    return Script(text, sha1(text.encode()).hexdigest())
