"""Room for connections: how many there may be, and which go when it gets short.

    limit of open files ──> raised as far as may be ──> less what the process needs ──> connections of HTTP, of gRPC

The server takes as many as that, and the kernel keeps the next ones waiting. Once NEARLY all are used, idle
ones are closed, longest idle first, down to half, so that waiting clients, a health check among them, get in.
A connection is idle between two requests, or before its first; a client that finds it closed connects again.
Connections whose client is slow with the head of a request are closed in any case: slow_heads.py.
"""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

import structlog

from services.gateway.door.arrivals import SINCE_CAME, SINCE_SENT, TCP_INFO, Arrivals
from services.gateway.door.slow_heads import SlowHeads

log = structlog.get_logger(__name__)
LOOK_S, AGAIN_S = 0.25, 0.05
NEARLY = 3 / 4
# Seconds without data after which a connection counts as idle: a request may be just arriving.
IDLE_MS = 500
# How often connections are examined within the time that a head may take, and how many of them before a yield.
LOOKS, IN_A_TURN = 4, 64
# Descriptors for short-lived files, connections to workers and Redis, and pipes of the helper process.
RESERVE = 64
MOST = 2048
MOST_SOUGHT = 2**16  # descriptors
OPEN = Path("/proc/self/fd")
# A client's deadline counts from when it sent the request.
SAYS_DEADLINE = frozenset((b"x-request-timeout-ms", b"x-request-timeout"))
SINCE_S = "tandem.since_s"
NAME = itemgetter(0)


@dataclass(frozen=True, slots=True)
class Room:
    http: int
    grpc: int

    @classmethod
    def of(cls, open_files: int) -> Room:
        """Returns the bounds that a limit of `open_files` leaves, before any file is open."""
        free = max(16, open_files - len(_descriptors()) - 2 * RESERVE)
        return cls(http=min(MOST, free * 3 // 4), grpc=min(MOST, free // 4))


def raise_limit() -> int:
    """Raise the soft limit of open files to the hard one. Returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(ValueError, OSError):  # the kernel may refuse even the hard limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


class Connections:
    """The connections of one port, at most `most`. An ASGI app around the served one; `run` closes idle connections.

    `SINCE_S` in a scope is the age of its request in seconds, where it has a deadline.
    """

    def __init__(self, app: Any, port: int, most: int, header_timeout_s: float) -> None:
        self._app, self._port, self.most = app, port, most
        self._heads, self._heads_s = SlowHeads(header_timeout_s), header_timeout_s / LOOKS
        self._arrivals, self._glance = Arrivals(port), _Glance()
        self._busy: set[Any] = set()  # addresses of clients whose request runs

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        client = scope["client"]
        self._busy.add(client)
        if not SAYS_DEADLINE.isdisjoint(map(NAME, scope["headers"])):
            scope[SINCE_S] = self._arrivals.since_s(client)
        try:
            await self._app(scope, receive, send)
        finally:
            self._busy.discard(client)
            self._heads.answered(client, asyncio.get_running_loop().time())

    def close(self) -> None:
        self._arrivals.close()
        self._glance.close()

    async def run(self) -> None:
        """Close idle and slow connections, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._make_room_again_and_again())
            tasks.create_task(self._close_slow_heads())

    async def _close_slow_heads(self) -> None:
        now = asyncio.get_running_loop().time
        while True:
            await asyncio.sleep(self._heads_s)
            began, seen = now(), set()
            for number, one in enumerate(self._found(), 1):
                seen.add(one.client)
                is_busy = one.client in self._busy
                if not is_busy and self._heads.is_late(one.client, now() - one.came_ms / 1000, now()):
                    self._shut(one)
                if number % IN_A_TURN == 0:
                    await asyncio.sleep(0)
            self._heads.forget_others(seen, began)

    async def _make_room_again_and_again(self) -> None:
        closed = 0
        while True:
            await asyncio.sleep(AGAIN_S if closed else LOOK_S)
            # Counting all files is cheap; telling which are connections is not.
            closed = self.make_room() if len(_descriptors()) > NEARLY * self.most else 0

    def make_room(self) -> int:
        """Close idle connections, down to half of the most. Returns how many were closed."""
        found = list(self._found())
        idle = sorted((one for one in found if one.idle_ms >= IDLE_MS), key=lambda one: one.idle_ms, reverse=True)
        going = idle[: len(found) - self.most // 2] if len(found) > NEARLY * self.most else []
        for one in going:
            self._shut(one)
        if going:
            log.warning("idle connections closed", closed=len(going), open=len(found), most=self.most)
        return len(going)

    def _found(self) -> Iterator[_Found]:
        for number in _descriptors():
            if (found := self._look(number)) is not None:
                yield found

    def _look(self, number: int) -> _Found | None:
        """Returns the connection of a descriptor; None if it is no connection of this port."""
        try:
            if not stat.S_ISSOCK(os.fstat(number).st_mode):
                return None
            with self._glance.at(number) as connection:
                if connection.type != socket.SOCK_STREAM or connection.getsockname()[1] != self._port:
                    return None
                peer = connection.getpeername()
                numbers = TCP_INFO.unpack(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO.size))
        except (OSError, ValueError, IndexError, TypeError):
            return None
        # The server's addresses have no zone.
        client, came_ms = (peer[0].partition("%")[0], str(peer[1])), numbers[SINCE_CAME]
        return _Found(number, client, came_ms, 0 if client in self._busy else min(numbers[SINCE_SENT], came_ms))

    def _shut(self, found: _Found) -> None:
        """Close the connection, unless its descriptor has been reused."""
        with suppress(OSError, ValueError), self._glance.at(found.number) as connection:
            if connection.getpeername()[1] == int(found.client[1]) and connection.getsockname()[1] == self._port:
                connection.shutdown(socket.SHUT_RDWR)


class _Glance:
    """A spare descriptor, duplicated onto each socket to examine, so that its owner may close its own meanwhile.

    Examining takes no new descriptor: there may be none left just when this is needed most.
    """

    def __init__(self) -> None:
        self._nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self._own = os.dup(self._nothing)

    @contextmanager
    def at(self, number: int) -> Iterator[socket.socket]:
        """Raises OSError | ValueError: it is no socket, or not open."""
        os.dup2(number, self._own, inheritable=False)
        try:
            connection = socket.socket(fileno=self._own)
            try:
                yield connection
            finally:
                connection.detach()
        finally:
            os.dup2(self._nothing, self._own, inheritable=False)

    def close(self) -> None:
        for number in (self._own, self._nothing):
            os.close(number)
        self._own = self._nothing = -1  # the numbers may be reused from now on


@dataclass(frozen=True, slots=True)
class _Found:
    number: int  # its descriptor
    client: tuple[str, str]
    came_ms: int  # age of its last data
    idle_ms: int


def _descriptors() -> Sequence[int]:
    """Returns the open descriptors, or all possible ones if none is free to list them with."""
    try:
        return [int(name) for name in os.listdir(OPEN)]
    except FileNotFoundError:
        return ()
    except OSError:
        return range(min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], MOST_SOUGHT))
