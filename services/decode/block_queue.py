"""The queue of reservations that the block pool has no room for yet, by priority, then by arrival.

If no request waits and there is room, a request takes its blocks immediately, beside the engine's step. Else, between
two steps, waiting requests are reserved in order, up to the first that does not fit; a request that can never fit is
refused, wherever it stands. A waiting request holds nothing and the first in line is never overtaken, so small requests
do not starve a big one, and no cycle of waiting can form.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

from tandem.engine import Engine, Request
from tandem.worker import Added, Ended, EnginePort, Event


@dataclass(order=True, slots=True)
class QueuedSequence:
    """A request in line.

    `answered`: set on the engine's thread, when the event that removes the request is on its way.
    """

    priority: int
    arrival: int
    request: Request = field(compare=False)
    may_fit: bool = field(default=False, compare=False)  # the request is valid and only has to wait
    answered: bool = field(default=False, compare=False)


class BlockQueue:
    """The queue.

    Each request that enters gets an Added or Ended event of the engine; its owner must then call `leave`.
    """

    def __init__(self, engine: EnginePort) -> None:
        self._engine = engine
        self._line: list[QueuedSequence] = []
        self._waiting: dict[str, QueuedSequence] = {}
        self._arrivals = count()
        self._looking = False  # `_reserve_in_order` is submitted and has not begun yet

    def __len__(self) -> int:
        return len(self._line)

    def enter(self, request: Request) -> Added | None:
        """Takes blocks for the prompt and a likely answer.

        Returns Added if that is possible immediately; else the event comes as soon as it is the request's turn and
        there is room.
        """
        added = None if self._line else self._engine.beside_step(lambda engine: _take_free(engine, request))
        if added is None:
            waiting = self._waiting[request.request_id] = QueuedSequence(
                request.priority, next(self._arrivals), request
            )
            insort(self._line, waiting)
            self.look_again()
        return added

    def leave(self, request_id: str) -> None:
        """Removes a request that is answered, or given up: it may have just got its blocks, so its owner aborts it
        then.
        """
        waiting = self._waiting.pop(request_id, None)
        if waiting is not None:
            self._line.remove(waiting)
            self.look_again()

    def look_again(self) -> None:
        """Tries the line again, as blocks may have become free, or the line has changed."""
        if self._line and not self._looking:
            self._looking = True
            self._engine.submit_with_turn("", self._reserve_in_order)

    def _reserve_in_order(self, engine: Engine) -> Sequence[Event]:
        """Reserves blocks for waiting requests, in order, on the engine's thread. Returns their events."""
        self._looking = False  # reset before the line is copied, so that later changes are looked at again
        events: list[Event] = []
        has_room = True
        for waiting in [waiting for waiting in self._line.copy() if not waiting.answered]:
            try:
                if not has_room and not waiting.may_fit:
                    engine.check(waiting.request)
                added = _reserve(engine, waiting.request) if has_room else None
            except ValueError as error:
                waiting.answered = True
                events.append(Ended(waiting.request.request_id, error))
                continue
            waiting.may_fit, has_room = True, added is not None
            if added is not None:
                waiting.answered = True
                events.append(added)
        return events


def _take_free(engine: Engine, request: Request) -> Added | None:
    """Reserves free blocks; None without room, or if the engine refuses the request: an event then reports why."""
    try:
        return _reserve(engine, request, outranks=False)
    except ValueError:
        return None


def _reserve(engine: Engine, request: Request, outranks: bool = True) -> Added | None:
    cached = engine.reserve(request, outranks)
    if cached is None:
        return None
    name = request.request_id
    return Added(name, cached, engine.landing_blocks(name), engine.landing_places(name))
