"""The transfers that a receiver expects, as a state machine: no socket, no thread, no clock; time comes in as `now`.

    expect: AWAITED -> BEGIN: bound to one link -> FRAME*: writing, written -> COMMIT: committed
    at any time: cancel (silent), or a bad frame, ABORT, loss of the link, deadline -> aborted
    a transfer that only one sender may begin is aborted when that sender's link is lost, even if the sender has opened
    another, and when no BEGIN comes in time: the BEGIN may have been sent on a link that this side had lost already.
    Soon after that sender has opened a new one, for on that it begins at once what it has not begun yet

A transfer is reported as ended, or fenced, only when no write to its blocks is under way: its owner may assign them
to another sequence at once.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Container
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tandem.transfer.protocol.coverage import Coverage
from tandem.transfer.protocol.endpoint import TransferError

# Seconds after its deadline by which a transfer has to be gone.
LATE_S = 1.0


class LandingLink(Protocol):
    """The link that a transfer comes over. `ended`: its transfers to report."""

    ended: deque[Landing]

    def acknowledge(self, landing: Landing) -> None: ...
    def refuse(self, handle: int, error: TransferError) -> None: ...
    def release(self, landing: Landing, error: TransferError | None) -> None: ...


@dataclass(eq=False, slots=True)
class Landing:
    """One expected transfer. It has ended once `payload` (committed) or `error` (aborted) is set, or `cancelled`.

    may_be_less: its sender says how many of the blocks it has, from the first on.
    sender: the only incarnation that may send it; empty where any may. begin_by: when that sender has to have begun.
    fences: resolve once it is no longer `busy`.
    """

    transfer_id: str
    block_ids: NDArray[np.int64]
    first_block: int
    deadline: float
    on_commit: Callable[[bytes, int], None]
    on_abort: Callable[[str, str], None]
    sender: str = ""
    begin_by: float = math.inf
    may_be_less: bool = False
    overtaken: bool = False  # its sender has opened a newer link, and may have begun it on an older one
    coverage: Coverage | None = None
    link: LandingLink | None = None
    handle: int = 0
    bytes_received: int = 0
    writing: bool = False
    calling: bool = False
    payload: bytes | None = None
    error: TransferError | None = None
    cancelled: bool = False
    fences: list[Future[None]] = field(default_factory=list)

    @property
    def busy(self) -> bool:
        """True while a write to its blocks or one of its callbacks is under way."""
        return self.writing or self.calling


class Landings:
    """Every expected transfer of a receiver: `live`, or `ending`: not yet reported, or busy still though cancelled.

    ended: those to report that no link had begun. fenced: cancelled ones whose fences resolve now.
    """

    def __init__(self) -> None:
        self.live: dict[str, Landing] = {}
        self.ending: dict[str, Landing] = {}
        self.ended: deque[Landing] = deque()
        self.fenced: deque[Landing] = deque()
        self._links: defaultdict[str, list[object]] = defaultdict(list)  # of each incarnation, the oldest first

    def expect(self, landing: Landing) -> None:
        if landing.transfer_id in self.live or landing.transfer_id in self.ending:
            raise ValueError(f"transfer_id: {landing.transfer_id!r} is expected already")
        self.live[landing.transfer_id] = landing

    def cancel(self, transfer_id: str, fence: Future[None]) -> None:
        """No write and no callback of this transfer begins any more; `fence` is for when none is under way either."""
        landing = self.live.get(transfer_id) or self.ending.get(transfer_id) or _nothing(transfer_id)
        if landing.payload is not None and landing.link and not landing.calling and not landing.cancelled:
            landing.link.refuse(landing.handle, TransferError("ABORTED", f"{transfer_id}: cancelled"))
        landing.cancelled = True
        landing.fences.append(fence)
        self._detach(landing, TransferError("ABORTED", f"{transfer_id}: the receiver cancelled it"))
        self.ending[transfer_id] = landing
        self.settle(landing)

    def end(self, landing: Landing, error: TransferError) -> None:
        if landing.transfer_id in self.live:
            landing.error = error
            self._detach(landing, error)
            self.ending[landing.transfer_id] = landing
            if not landing.writing:
                self.report(landing)

    def linked(self, sender: str, link: object) -> None:
        """One more link of this incarnation."""
        self._links[sender].append(link)
        for landing in self._awaited(sender):
            landing.overtaken = True

    def settled(self, sender: str, link: object) -> None:
        """Give up what was expected before this link was opened: begun on it by now, or else on one that was lost."""
        if self._links[sender][-1] is link:
            for landing in self._awaited(sender):
                if landing.overtaken:
                    text = f"{landing.transfer_id}: {sender} did not begin it on its new link"
                    self.end(landing, TransferError("UNAVAILABLE", text))

    def num_links(self, sender: str) -> int:
        return len(self._links.get(sender, ()))

    def lost(self, sender: str, link: object, error: TransferError) -> None:
        """Forget a link. Transfers not begun yet are aborted: with the last link all, with an older one those that may
        have begun on it."""
        links = self._links[sender]
        replaced = links[-1] is not link
        links.remove(link)
        for landing in self._awaited(sender):
            if not links or (replaced and landing.overtaken):
                self.end(landing, error)
        if not links:
            del self._links[sender]

    def _awaited(self, sender: str) -> list[Landing]:
        """Landings that this incarnation alone may begin, and has not."""
        return [landing for landing in self.live.values() if landing.link is None and landing.sender == sender]

    def commit(self, landing: Landing, payload: bytes) -> None:
        landing.payload = payload
        self._detach(landing, None)
        self.ending[landing.transfer_id] = landing
        self.report(landing)

    def report(self, landing: Landing) -> None:
        """No write is under way any more: its owner may know."""
        (landing.link.ended if landing.link else self.ended).append(landing)

    def reported(self, landing: Landing) -> None:
        """Its callback has returned."""
        landing.calling = False
        if landing.cancelled:
            self.settle(landing)
        else:
            del self.ending[landing.transfer_id]

    def settle(self, landing: Landing) -> None:
        """Forgets a cancelled transfer unless it is busy."""
        if not landing.busy:
            del self.ending[landing.transfer_id]
            self.fenced.append(landing)

    def tick(self, now: float) -> None:
        for landing in [w for w in self.live.values() if now >= w.deadline]:
            self.end(landing, TransferError("DEADLINE_EXCEEDED", f"{landing.transfer_id}: deadline passed"))
        for landing in [w for w in self.live.values() if w.link is None and now >= w.begin_by]:
            text = f"{landing.transfer_id}: {landing.sender} did not begin it in time"
            self.end(landing, TransferError("UNAVAILABLE", text))

    def violations(self, accounted: Container[str], now: float) -> list[str]:
        """Transfers that are expected but have no owner among these, or should have ended."""
        wrong = []
        for landing in self.live.values():
            if landing.transfer_id not in accounted:
                wrong.append(f"transfer {landing.transfer_id}: expected, but for no sequence")
            elif now > landing.deadline + LATE_S:
                wrong.append(f"transfer {landing.transfer_id}: expected still behind its deadline")
        return wrong + [f"transfer {transfer_id}: has ended and is not reported" for transfer_id in self.ending]

    def _detach(self, landing: Landing, error: TransferError | None) -> None:
        self.live.pop(landing.transfer_id, None)
        if landing.link is not None:
            landing.link.release(landing, error)


def _nothing(transfer_id: str) -> Landing:
    """A landing for an unknown id: never begun, so fenced at once."""
    return Landing(transfer_id, np.empty(0, np.int64), 0, 0.0, lambda *_: None, lambda *_: None)
