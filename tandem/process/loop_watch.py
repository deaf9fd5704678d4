"""A watchdog that ends a process whose event loop is blocked: its own code could not notice, and its peers wait."""

from __future__ import annotations

import asyncio
import faulthandler
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

STALL_S = 20.0


@asynccontextmanager
async def ends_where_it_stands_still() -> AsyncIterator[None]:
    """Ends the process with status 1 and a traceback if the running loop is blocked for STALL_S inside the block.

    The watchdog does not need the GIL, so code that holds the GIL for ever cannot stop it.

    Raises:
        OSError: the system cannot start another thread for the watchdog; raised in the task, which is cancelled.
    """
    turning, inside = asyncio.create_task(_say_that_it_turns()), asyncio.current_task()
    assert inside is not None
    turning.add_done_callback(lambda done: done.cancelled() or inside.cancel())
    try:
        yield
    except asyncio.CancelledError:
        if not turning.done() or turning.cancelled():
            raise
        inside.uncancel()
        raise OSError(f"the event loop cannot be watched any more: {turning.exception()}") from None
    finally:
        turning.cancel()


async def _say_that_it_turns() -> None:
    with _never_full() as output:
        try:
            while True:
                faulthandler.dump_traceback_later(STALL_S, exit=True, file=output)
                await asyncio.sleep(STALL_S / 10)
        finally:
            faulthandler.cancel_dump_traceback_later()


@contextmanager
def _never_full() -> Iterator[int]:
    """Yields stderr made non-blocking: a full pipe loses the traceback rather than delay the end."""
    try:
        descriptor = os.open("/proc/self/fd/2", os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK)
    except OSError:  # stderr is a socket, or closed
        yield 2
        return
    try:
        yield descriptor
    finally:
        os.close(descriptor)
