"""Room for connections: how many there may be, and which go when it gets short.

    limit of open files ──> raised as far as may be ──> less what the process needs ──> connections of HTTP, of gRPC

The server takes as many as that, and the kernel keeps the next ones waiting. Once NEARLY all are there, those on which
nothing runs are closed, longest idle first, down to half, so that those who wait, a health check too, come in.
Idle is one between two requests, or before its first; a client that finds its own closed connects anew.
Those whose client is slow with the head of a request are closed in any case: slow_heads.py.
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
# Nothing has come for so long: a request that is just arriving is none of them.
IDLE_MS = 500
# How often connections are looked at within the time that a head may take, and how many of them between other work.
LOOKS, IN_A_TURN = 4, 64
# Files that are opened for a moment, connections to workers and Redis, pipes of the helper process.
RESERVE = 64
MOST = 2048
MOST_SOUGHT = 2**16  # descriptors
OPEN = Path("/proc/self/fd")
# Who says a deadline means one from when it sent the request.
SAYS_DEADLINE = frozenset((b"x-request-timeout-ms", b"x-request-timeout"))
SINCE_S = "tandem.since_s"
NAME = itemgetter(0)


@dataclass(frozen=True, slots=True)
class Room:
    http: int
    grpc: int

    @classmethod
    def of(cls, open_files: int) -> Room:
        """The bound for a limit of so many files, before any is open."""
        free = max(16, open_files - len(_descriptors()) - 2 * RESERVE)
        return cls(http=min(MOST, free * 3 // 4), grpc=min(MOST, free // 4))


def raise_limit() -> int:
    """Let the process open as many files as it may; returns how many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(ValueError, OSError):  # a hard limit that the kernel does not allow itself
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


class Connections:
    """Those of one port, at most `most`. An ASGI app around the one that is served; `run` closes idle ones.

    SINCE_S of a scope: how long ago its request came, where that matters.
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
        """Until cancelled."""
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
            # Counting all files is cheap; which of them are connections takes a look at each.
            closed = self.make_room() if len(_descriptors()) > NEARLY * self.most else 0

    def make_room(self) -> int:
        """Close what is idle, down to half of what there may be; returns how many were closed."""
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
        """None where the descriptor is no connection of this port."""
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
        """Closes the connection, unless its descriptor is another's by now."""
        with suppress(OSError, ValueError), self._glance.at(found.number) as connection:
            if connection.getpeername()[1] == int(found.client[1]) and connection.getsockname()[1] == self._port:
                connection.shutdown(socket.SHUT_RDWR)


class _Glance:
    """A descriptor to look at sockets of others through, so that their own may go meanwhile.

    It takes none while it looks: there may be none left, and then it is needed most.
    """

    def __init__(self) -> None:
        self._nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self._own = os.dup(self._nothing)

    @contextmanager
    def at(self, number: int) -> Iterator[socket.socket]:
        """
        Raises:
            OSError | ValueError: it is no socket, or not open.
        """
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
        self._own = self._nothing = -1  # the numbers are others' from now on


@dataclass(frozen=True, slots=True)
class _Found:
    number: int  # of its descriptor
    client: tuple[str, str]
    came_ms: int  # since data last came
    idle_ms: int


def _descriptors() -> Sequence[int]:
    """The descriptors that are open, and perhaps some that are not where none was left to look with."""
    try:
        return [int(name) for name in os.listdir(OPEN)]
    except FileNotFoundError:
        return ()
    except OSError:
        return range(min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], MOST_SOUGHT))
