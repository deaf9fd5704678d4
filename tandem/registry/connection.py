"""Redis itself: scripts called by hash, one channel listened to, every failure one error. The only file that knows it.

    call      EVALSHA, one round trip; EVAL where the server does not know the script yet (first call, or it restarted)
    changes   a subscription of its own connection; a message only says "look again"
    read      what a stream has behind a cursor, or what comes next

Every script takes the key prefix `{namespace}:` as its one key: the braces keep all keys of a cluster in one slot.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from hashlib import sha1
from importlib.resources import files
from typing import Any, TypeAlias
from urllib.parse import urlsplit

from redis import exceptions
from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.client import PubSub
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.client import NEVER_DECODE

from tandem.registry.errors import RegistryUnavailable

Argument: TypeAlias = str | bytes | int
# Of a stream: its id and its fields.
Entry: TypeAlias = tuple[str, dict[bytes, bytes]]
SCRIPTS = (
    "lease", "deregister", "workers", "select", "release", "abandon", "publish", "locate", "heads", "page", "sweep",
    "check",
)  # fmt: skip
# What a script begins with, behind the ledger.
PARTS = {"select": ("table", "costs", "expected")}
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
    """A pool of connections to one Redis and the scripts run there. `close` ends it."""

    def __init__(self, url: str, namespace: str, timeout: float, max_connections: int) -> None:
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
        pool = BlockingConnectionPool.from_url(
            url,
            max_connections=max_connections,
            timeout=timeout,
            socket_timeout=timeout,
            socket_connect_timeout=timeout,
            decode_responses=True,
            # One quick second try covers a connection that died idle; the scripts bear being run twice.
            retry=Retry(NoBackoff(), 1, supported_errors=(exceptions.ConnectionError,)),
        )
        self._redis = Redis.from_pool(pool)

    async def call(self, name: str, *arguments: Argument, binary: bool = False) -> Any:
        """Run one script, within the timeout. Strings in the answer are bytes where `binary`.

        Raises:
            RegistryUnavailable: Redis did not answer; the script may have run all the same.
        """
        script = self._scripts[name]
        options = {NEVER_DECODE: True} if binary else {}
        with self._translated():
            async with asyncio.timeout(self._timeout):
                try:
                    return await self._execute("EVALSHA", script.sha, 1, self._prefix, *arguments, **options)
                except exceptions.NoScriptError:
                    return await self._execute("EVAL", script.text, 1, self._prefix, *arguments, **options)

    async def read(self, stream: str, cursor: str, count: int, wait: float) -> list[Entry]:
        """At most `count` entries behind `cursor`, oldest first; if there are none yet, the next that come within
        `wait` seconds (and the timeout), or none.

        Raises:
            RegistryUnavailable
        """
        wait_ms = round(min(wait, self._timeout / 2) * 1000)
        block = ("BLOCK", wait_ms) if wait_ms else ()  # BLOCK 0 is for ever
        command = ("XREAD", "COUNT", count, *block, "STREAMS", self._prefix + stream, cursor)
        with self._translated():
            async with asyncio.timeout(self._timeout):
                found = await self._execute(*command, **{NEVER_DECODE: True})
        return [(entry_id.decode(), fields) for _, entries in found for entry_id, fields in entries]

    async def ping(self) -> None:
        with self._translated():
            async with asyncio.timeout(self._timeout):
                await self._redis.ping()

    @asynccontextmanager
    async def changes(self) -> AsyncIterator[Changes]:
        """Listen on the channel `changed`."""
        pubsub = self._redis.pubsub(ignore_subscribe_messages=True)
        try:
            with self._translated():
                async with asyncio.timeout(self._timeout):
                    await pubsub.subscribe(self._prefix + "changed")
            yield Changes(pubsub, self)
        finally:
            await pubsub.aclose()  # type: ignore[no-untyped-call]

    async def close(self) -> None:
        await self._redis.aclose()

    async def _execute(self, *command: Argument, **options: bool) -> Any:
        return await self._redis.execute_command(*command, **options)  # type: ignore[no-untyped-call]

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            with _cancellable():
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
            return bool(await self._pubsub.get_message(timeout=timeout))


@contextmanager
def _cancellable() -> Iterator[None]:
    """Cancel here what was cancelled inside and went on all the same.

    redis-py sends within `asyncio.wait_for`, which before Python 3.12 loses a cancellation that arrives in the moment
    when the sending ends, well or in an error.
    """
    task = asyncio.current_task()
    before = task.cancelling() if task else 0
    try:
        yield
    finally:
        if task and task.cancelling() > before:
            raise asyncio.CancelledError


def _load(name: str) -> Script:
    folder = files(__package__)
    text = "".join((folder / f"{part}.lua").read_text() for part in ("ledger", *PARTS.get(name, ()), name))
    return Script(text, sha1(text.encode()).hexdigest())
