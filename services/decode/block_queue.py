"""Waiting for room: reservations that the block pool cannot hold yet, in order of priority, then of arrival.

Where nobody waits and there is room, it is taken at once, beside the engine's step. Else, between two steps, everything
that fits is reserved, in that order, up to the first that does not; what never will is refused, wherever it stands.
Nothing is held while waiting and the first in line is never passed by, so a big request is not starved by small ones
and no cycle of waiting can form.
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
    """`answered` is set on the engine's thread: the event that takes it out of the line is on its way."""

    priority: int
    arrival: int
    request: Request = field(compare=False)
    may_fit: bool = field(default=False, compare=False)  # nothing in it is wrong, it only has to wait
    answered: bool = field(default=False, compare=False)


class BlockQueue:
    """Each that enters is answered with Added or Ended, by the engine's events; its owner then has it `leave`."""

    def __init__(self, engine: EnginePort) -> None:
        self._engine = engine
        self._line: list[QueuedSequence] = []
        self._waiting: dict[str, QueuedSequence] = {}
        self._arrivals = count()
        self._looking = False  # submitted, and not begun yet

    def __len__(self) -> int:
        return len(self._line)

    def enter(self, request: Request) -> Added | None:
        """Take blocks for the prompt and a likely answer: returned if that is possible at once, else an event as soon
        as it is this one's turn and there is room."""
        added = None if self._line else self._engine.beside_step(lambda engine: _take_free(engine, request))
        if added is None:
            waiting = self._waiting[request.request_id] = QueuedSequence(
                request.priority, next(self._arrivals), request
            )
            insort(self._line, waiting)
            self.look_again()
        return added

    def leave(self, request_id: str) -> None:
        """It is answered, or wants no blocks any more: then it may have just got them, and its owner aborts it."""
        waiting = self._waiting.pop(request_id, None)
        if waiting is not None:
            self._line.remove(waiting)
            self.look_again()

    def look_again(self) -> None:
        """Blocks may have become free, or the line has changed."""
        if self._line and not self._looking:
            self._looking = True
            self._engine.submit_with_turn("", self._reserve_in_order)

    def _reserve_in_order(self, engine: Engine) -> Sequence[Event]:
        """On the engine's thread: all that wait by now."""
        self._looking = False  # before the line is copied: what changes from now on is looked at again
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
    """None also where it is refused: the event says why."""
    try:
        return _reserve(engine, request, outranks=False)
    except ValueError:
        return None


def _reserve(engine: Engine, request: Request, outranks: bool = True) -> Added | None:
    cached = engine.reserve(request, outranks)
    return None if cached is None else Added(request.request_id, cached, engine.landing_blocks(request.request_id))
