"""Deadlines of requests, in shared timers: a timer for each would cost more than the work it guards.

at ──> a slot of SLOT_S ──> its entries, in order of coming, when the slot is over: never early, SLOT_S late at most
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from types import TracebackType
from typing import Any

SLOT_S = 0.02
# Seconds after its deadline for which a client that does not read is kept.
STALLED_S = 0.5
ROUNDING = 1e-6  # part of a slot
MOST_EMPTY = 64  # empty slots kept, beside as many as there are others


class Deadlines:
    """The deadlines of one event loop."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._slots: dict[int, dict[Entry, None]] = {}
        self._order: list[int] = []  # slots by time, emptied ones included
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return sum(map(len, self._slots.values()))

    def add(self, at: float, call: Callable[..., object], *arguments: Any) -> Entry:
        """Call a function at a time of the event loop's clock, unless the entry is cancelled."""
        entry = Entry(self, call, arguments)
        self.put(at, entry)
        return entry

    def put(self, at: float, entry: Entry) -> None:
        entry.slot = slot = int(at / SLOT_S) + 1
        if (entries := self._slots.get(slot)) is not None:
            entries[entry] = None
            return
        self._slots[slot] = {entry: None}
        heappush(self._order, slot)
        if len(self._order) > MOST_EMPTY + 2 * len(self._slots):
            self._order = list(self._slots)
            heapify(self._order)
        if self._order[0] == slot:
            self._wait()

    def until(self, at: float) -> Bound:
        """Returns a context that raises TimeoutError in its block at that time."""
        return Bound(self, at)

    def _remove(self, entry: Entry) -> None:
        entries = self._slots.get(entry.slot)
        if entries is not None:
            entries.pop(entry, None)
            if not entries:
                del self._slots[entry.slot]

    def _wait(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.loop.call_at(self._order[0] * SLOT_S, self._end) if self._order else None

    def _end(self) -> None:
        over = self.loop.time() / SLOT_S + ROUNDING
        try:
            while self._order and (self._order[0] <= over or self._order[0] not in self._slots):
                if entries := self._slots.get(self._order[0]):
                    entry = next(iter(entries))
                    self._remove(entry)
                    entry.expire()
                else:
                    heappop(self._order)
        finally:  # a call that raises, which the loop reports, must not stop the others
            self._wait()


class Entry:
    __slots__ = ("_arguments", "_call", "_deadlines", "slot")
    slot: int  # the slot that it is in

    def __init__(self, deadlines: Deadlines, call: Callable[..., object], arguments: tuple[Any, ...]) -> None:
        self._deadlines, self._call, self._arguments = deadlines, call, arguments

    def expire(self) -> None:
        """Call the function now."""
        self._call(*self._arguments)

    def cancel(self) -> None:
        self._deadlines._remove(self)


class Bound(Entry):
    """A plain context manager that does what asyncio.timeout_at does."""

    __slots__ = ("__weakref__", "_at", "_cancelling", "_is_open", "_task", "expired")

    def __init__(self, deadlines: Deadlines, at: float) -> None:
        self._deadlines, self._at = deadlines, at
        self.expired = self._is_open = False

    def __enter__(self) -> Bound:
        task = asyncio.current_task(self._deadlines.loop)
        assert task is not None
        self._task, self._cancelling, self._is_open = task, task.cancelling(), True
        self._deadlines.put(self._at, self)
        return self

    def expire(self) -> None:
        """End the block by TimeoutError, unless it has ended."""
        if self._is_open and not self.expired:
            self.cancel()
            self.expired = True
            self._task.cancel()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.cancel()
        self._is_open = False
        if self.expired and self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise TimeoutError from error
