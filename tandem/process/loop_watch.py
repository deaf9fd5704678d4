"""The end of a process whose event loop does not turn: nobody in it could notice, and its peers wait."""

from __future__ import annotations

import asyncio
import faulthandler
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

STALL_S = 20.0


@asynccontextmanager
async def ends_where_it_stands_still() -> AsyncIterator[None]:
    """Inside, the process ends with status 1 and a traceback where the running loop has not turned for STALL_S.

    Needs no lock of the interpreter: code that holds it for ever cannot hold this up.

    Raises:
        OSError: in the place of what it was cancelled in: the system has no thread left to watch with.
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
    """Stderr; where that is a pipe that nobody reads, what has no room is lost: it must not hold up the end."""
    try:
        descriptor = os.open("/proc/self/fd/2", os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK)
    except OSError:  # a socket, or none
        yield 2
        return
    try:
        yield descriptor
    finally:
        os.close(descriptor)
