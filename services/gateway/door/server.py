"""Granian, embedded: Rust reads and writes HTTP, the app runs on this process's own event loop beside gRPC.

start -> serving -> close (no new connections, idle ones end) -> stop, once the app has ended its requests
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import structlog
from granian.constants import HTTPModes, Interfaces
from granian.http import HTTP1Settings
from granian.server.embed import Server

from services.gateway.door.connections import MOST, Connections
from services.gateway.door.slow_heads import KEPT_S
from tandem.hosts import address, reached_from_here, resolved

log = structlog.get_logger(__name__)
START_WAIT_S = 10.0
STOP_WAIT_S = 3.0
POLL_S = 0.02


class HttpServer:
    """Serves one ASGI app on one address. `shared`: other processes may listen there and take a share of connections.

    A `port` of 0 is replaced by a free one in `start`.
    """

    def __init__(self, app: Any, host: str, port: int, shared: bool, header_timeout_s: float, most: int = MOST) -> None:
        """`most`: connections at once; the next ones wait in the kernel."""
        self._app, self._host, self.port, self._shared, self._most = app, host, port, shared, most
        self._header_timeout_s = header_timeout_s
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    async def start(self) -> None:
        """Start accepting connections.

        Raises:
            OSError: the address cannot be bound.
        """
        self._address = resolved(self._host)  # Granian takes addresses only
        with socket.socket(socket.AF_INET6 if ":" in self._address else socket.AF_INET) as probe:
            # Granian always listens with SO_REUSEPORT, which would hide that another process has the address.
            is_free = self.port == 0
            beside = socket.SO_REUSEPORT if self._shared or is_free else socket.SO_REUSEADDR
            probe.setsockopt(socket.SOL_SOCKET, beside, 1)
            probe.bind((self._address, self.port))
            self.port = probe.getsockname()[1]
            if not is_free:  # otherwise this socket holds the port until Granian listens
                probe.close()
            await self._listen()

    async def _listen(self) -> None:
        self._connections = Connections(self._app, self.port, self._most, self._header_timeout_s)
        self._server = Server(
            self._connections, address=self._address, port=self.port, interface=Interfaces.ASGINL, websockets=False,
            log_enabled=False, backlog=2048, backpressure=self._most,
            # To recognise HTTP/2 in the clear, first bytes would be awaited without bound.
            http=HTTPModes.http1,
            http1_settings=HTTP1Settings(header_read_timeout=round(1000 * max(KEPT_S, self._header_timeout_s))),
        )  # fmt: skip
        self._task = asyncio.create_task(self._server.serve())
        async with asyncio.timeout(START_WAIT_S):
            while not await self._answers():
                if self._task.done():
                    self._task.result()
                    raise OSError(f"cannot listen on {address(self._address, self.port)}")
                await asyncio.sleep(POLL_S)

    async def run(self) -> None:
        """Wait until the server ends by itself, which is a failure."""
        assert self._task is not None
        closing = asyncio.create_task(self._connections.run())
        try:
            await asyncio.wait({self._task, closing}, return_when=asyncio.FIRST_COMPLETED)
            for task in (self._task, closing):
                if task.done():
                    task.result()
        finally:
            closing.cancel()

    def close(self) -> None:
        """Stop accepting connections and end idle ones; responses under way continue."""
        if self._task is not None and not self._task.done() and not self._closed:
            self._closed = True
            self._server.stop()  # type: ignore[no-untyped-call]

    async def stop(self) -> None:
        """Close, and wait a bounded time: connections that do not end are dropped with the process."""
        if self._task is None or self._task.done():
            return
        self.close()
        await asyncio.wait({self._task}, timeout=STOP_WAIT_S)
        if not self._task.done():
            log.warning("HTTP connections did not end in time")
            self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._connections.close()

    async def _answers(self) -> bool:
        try:
            _, writer = await asyncio.open_connection(reached_from_here(self._address), self.port)
        except OSError:
            return False
        writer.close()
        return True
