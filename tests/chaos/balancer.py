"""A plain TCP balancer: connections go to backends in turn, past one that refuses. It looks into nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import count


@asynccontextmanager
async def balanced(backends: Sequence[int]) -> AsyncIterator[int]:
    """The port of a balancer over these ports."""
    turns, tasks = count(), set[asyncio.Task[None]]()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        try:
            there, back = await connected(next(turns))
            await asyncio.gather(_pipe(reader, back), _pipe(there, writer))
        except OSError:
            writer.transport.abort()

    async def connected(turn: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        for port in [backends[(turn + i) % len(backends)] for i in range(len(backends))]:
            with suppress(OSError):
                return await asyncio.open_connection("127.0.0.1", port)
        raise ConnectionRefusedError

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    except OSError:
        writer.transport.abort()
    finally:
        writer.close()
