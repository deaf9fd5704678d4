"""The transfers that a receiver expects, as a state machine: no socket, no thread, no clock; time comes in as `now`.

    expect: AWAITED -> BEGIN: bound to one link -> FRAME*: writing, written -> COMMIT: committed
    at any time: cancel (silent), or a bad frame, ABORT, loss of the link, deadline -> aborted
    a transfer that only one sender may begin is aborted when that sender's link is lost, even if the sender has opened
    another, and when no BEGIN comes in time: the BEGIN may have been sent on a link that this side had lost already.
    It is also aborted soon after that sender has opened a new link without beginning it there immediately

A transfer is reported as ended, or its fences resolve, only when no write to its blocks is under way: its owner may
then immediately give the blocks to another sequence.
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

# Seconds after its deadline within which a transfer must have ended.
LATE_S = 1.0


class LandingLink(Protocol):
    """The link over which a transfer comes. `ended`: the link's transfers to report."""

    ended: deque[Landing]

    def acknowledge(self, landing: Landing) -> None: ...
    def refuse(self, handle: int, error: TransferError) -> None: ...
    def release(self, landing: Landing, error: TransferError | None) -> None: ...


@dataclass(eq=False, slots=True)
class Landing:
    """An expected transfer. It has ended once `payload` (committed) or `error` (aborted) is set, or `cancelled`.

    may_be_less: the sender may send only some of the blocks, from the first on; BEGIN names how many.
    sender: the only incarnation that may send it; empty: any may. begin_by: the time by which that sender must begin.
    places: where the blocks go in layers with a window; empty if there are none.
    fences: futures that resolve once the transfer is no longer `busy`.
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
    places: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    overtaken: bool = False  # since it was expected, its sender has opened a newer link
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
        """True while a write to the transfer's blocks or one of its callbacks is under way."""
        return self.writing or self.calling


class Landings:
    """The transfers of a receiver: `live` ones, and `ending` ones: not reported yet, or cancelled and still busy.

    ended: transfers to report that began on no link. fenced: cancelled transfers whose fences are to be resolved.
    """

    def __init__(self) -> None:
        self.live: dict[str, Landing] = {}
        self.ending: dict[str, Landing] = {}
        self.ended: deque[Landing] = deque()
        self.fenced: deque[Landing] = deque()
        self._links: defaultdict[str, list[object]] = defaultdict(list)  # links by incarnation, the oldest first

    def expect(self, landing: Landing) -> None:
        if landing.transfer_id in self.live or landing.transfer_id in self.ending:
            raise ValueError(f"transfer_id: {landing.transfer_id!r} is expected already")
        self.live[landing.transfer_id] = landing

    def cancel(self, transfer_id: str, fence: Future[None]) -> None:
        """Cancels a transfer: no write or callback of it begins any more. `fence` resolves once none is under way."""
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
        """Records a new link of the incarnation `sender`."""
        self._links[sender].append(link)
        for landing in self._awaited(sender):
            landing.overtaken = True

    def settled(self, sender: str, link: object) -> None:
        """Aborts transfers expected before `link` was opened and not begun since: their BEGIN went to a lost link."""
        if self._links[sender][-1] is link:
            for landing in self._awaited(sender):
                if landing.overtaken:
                    text = f"{landing.transfer_id}: {sender} did not begin it on its new link"
                    self.end(landing, TransferError("UNAVAILABLE", text))

    def num_links(self, sender: str) -> int:
        return len(self._links.get(sender, ()))

    def lost(self, sender: str, link: object, error: TransferError) -> None:
        """Forgets a link and aborts transfers of `sender` not begun yet: all of them if this was its last link; if a
        newer link exists, those that may have begun on this one."""
        links = self._links[sender]
        replaced = links[-1] is not link
        links.remove(link)
        for landing in self._awaited(sender):
            if not links or (replaced and landing.overtaken):
                self.end(landing, error)
        if not links:
            del self._links[sender]

    def _awaited(self, sender: str) -> list[Landing]:
        """Returns the landings that only the incarnation `sender` may begin and that have not begun."""
        return [landing for landing in self.live.values() if landing.link is None and landing.sender == sender]

    def commit(self, landing: Landing, payload: bytes) -> None:
        landing.payload = payload
        self._detach(landing, None)
        self.ending[landing.transfer_id] = landing
        self.report(landing)

    def report(self, landing: Landing) -> None:
        """Queues an ended transfer for its callback; no write to its blocks may be under way."""
        (landing.link.ended if landing.link else self.ended).append(landing)

    def reported(self, landing: Landing) -> None:
        """Forgets a transfer whose callback has returned."""
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
        """Describes the transfers that are expected but not `accounted` for, or that should have ended."""
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
    """Makes a landing for an unknown id, which never began, so its fence resolves immediately."""
    return Landing(transfer_id, np.empty(0, np.int64), 0, 0.0, lambda *_: None, lambda *_: None)
