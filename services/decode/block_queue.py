"""Waiting for room: reservations that the block pool cannot hold yet, in order of priority, then of arrival.

Where nobody waits and there is room, it is taken at once, beside the engine's step. Else, between two steps, everything
that fits is reserved, in that order, up to the first that does not; what never will is refused, wherever it stands.
Nothing is held while waiting and the first in line is never passed by, so a big request is not starved by small ones
and no cycle of waiting can form.
"""

from __future__ import annotations

import asyncio
from bisect import insort
from dataclasses import dataclass, field
from itertools import count
from typing import TypeAlias

from tandem.engine import Engine, Request
from tandem.worker import EnginePort

# Prompt tokens that are cached here, and the physical ids of all the prompt's blocks in order.
Reserved: TypeAlias = tuple[int, list[int]]


@dataclass(order=True, slots=True)
class Waiting:
    priority: int
    arrival: int
    request: Request = field(compare=False)
    result: asyncio.Future[Reserved] = field(compare=False)
    may_fit: bool = field(default=False, compare=False)  # nothing in it is wrong, it only has to wait


class BlockQueue:
    def __init__(self, engine: EnginePort) -> None:
        self._engine = engine
        self._line: list[Waiting] = []
        self._arrivals = count()
        self._loop = asyncio.get_running_loop()
        self._trying = self._again = False

    def __len__(self) -> int:
        return len(self._line)

    async def reserve(self, request: Request) -> Reserved:
        """Take blocks for the prompt and a likely answer as soon as it is this one's turn and there is room.

        Raises:
            ValueError: it can never fit; names the field.
            EngineDied
        """
        reserved = None if self._line else self._engine.beside_step(lambda engine: _take_free(engine, request))
        if reserved is not None:
            return reserved
        waiting = Waiting(request.priority, next(self._arrivals), request, self._loop.create_future())
        insort(self._line, waiting)
        self.look_again()
        try:
            return await waiting.result
        except asyncio.CancelledError:
            self._engine.submit(lambda engine: engine.abort(request.request_id))  # it may just have been reserved
            raise
        finally:
            if waiting in self._line:
                self._line.remove(waiting)
            self.look_again()

    def look_again(self) -> None:
        """Blocks may have become free, or the line has changed."""
        self._again = self._trying
        if not self._line or self._trying:
            return
        self._trying = True
        asyncio.wrap_future(self._engine.submit(self._reserve_in_order)).add_done_callback(self._tried)

    def _reserve_in_order(self, engine: Engine) -> list[tuple[Waiting, Reserved | ValueError]]:
        """On the engine's thread: all that wait by now."""
        outcomes: list[tuple[Waiting, Reserved | ValueError]] = []
        has_room = True
        for waiting in list(self._line):
            try:
                if not has_room and not waiting.may_fit:
                    engine.check(waiting.request)
                cached = engine.reserve(waiting.request) if has_room else None
            except ValueError as error:
                outcomes.append((waiting, error))
                continue
            waiting.may_fit, has_room = True, cached is not None
            if cached is not None:
                outcomes.append((waiting, (cached, engine.landing_blocks(waiting.request.request_id))))
        return outcomes

    def _tried(self, done: asyncio.Future[list[tuple[Waiting, Reserved | ValueError]]]) -> None:
        self._trying = False
        if done.cancelled():
            return
        error = done.exception()
        outcomes = done.result() if error is None else [(waiting, error) for waiting in self._line]
        for waiting, outcome in outcomes:
            if waiting.result.done():
                continue
            if isinstance(outcome, BaseException):
                waiting.result.set_exception(outcome)
            else:
                waiting.result.set_result(outcome)
            self._line.remove(waiting)
        if self._again:
            self.look_again()


def _take_free(engine: Engine, request: Request) -> Reserved | None:
    """None also where it is refused, as the engine may yet have to end another request of the same id."""
    try:
        cached = engine.reserve(request, outranks=False)
    except ValueError:
        return None
    return None if cached is None else (cached, engine.landing_blocks(request.request_id))
