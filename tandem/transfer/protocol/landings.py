"""The transfers that a receiver expects, as a state machine: no socket, no thread, no clock; time comes in as `now`.

    expect: AWAITED -> BEGIN: bound to one link -> FRAME*: landing, landed -> COMMIT: committed
    at any time: cancel (silent), or a bad frame, ABORT, loss of the link, deadline -> aborted
    a transfer expected of one sender alone does not wait for its BEGIN once that sender's link is lost

A transfer never ends while a copy of its blocks is under way: whoever hears of its end may give the blocks to somebody
else at once.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tandem.transfer.protocol.coverage import Coverage
from tandem.transfer.protocol.endpoint import TransferError


class Binding(Protocol):
    """The link a transfer comes over. `endings`: its transfers whose owners must be told, in order."""

    endings: deque[Inbound]

    def acknowledge(self, inbound: Inbound) -> None: ...
    def release(self, inbound: Inbound, error: TransferError | None) -> None: ...
    def refuse(self, handle: int, error: TransferError) -> None: ...


@dataclass(eq=False, slots=True)
class Inbound:
    """One expected transfer. It has ended once `payload` (committed) or `error` (aborted) is set, or `cancelled`.

    sender: the only incarnation that may send it; empty where any may.
    """

    transfer_id: str
    block_ids: NDArray[np.int64]
    first_block: int
    deadline: float
    on_commit: Callable[[bytes, int], None]
    on_abort: Callable[[str, str], None]
    sender: str = ""
    coverage: Coverage | None = None
    link: Binding | None = None
    handle: int = 0
    bytes_received: int = 0
    landing: bool = False
    payload: bytes | None = None
    error: TransferError | None = None
    cancelled: bool = False
    caller: int = 0  # the thread that runs its callback


class InboundTable:
    """Every expected transfer of a receiver. `endings`: those to tell of that no link had begun."""

    def __init__(self) -> None:
        self.live: dict[str, Inbound] = {}
        self.untold: dict[str, Inbound] = {}
        self.endings: deque[Inbound] = deque()
        self._links: Counter[str] = Counter()

    def expect(self, inbound: Inbound) -> None:
        if inbound.transfer_id in self.live or inbound.transfer_id in self.untold:
            raise ValueError(f"transfer_id: {inbound.transfer_id!r} is expected already")
        self.live[inbound.transfer_id] = inbound

    def cancel(self, transfer_id: str) -> Inbound | None:
        """The transfer, now without further frames or a callback not yet begun. Its landing may still be under way."""
        inbound = self.live.get(transfer_id) or self.untold.get(transfer_id)
        if inbound is not None:
            if inbound.payload is not None and inbound.link and not inbound.caller:
                inbound.link.refuse(inbound.handle, TransferError("ABORTED", f"{transfer_id}: cancelled"))
            inbound.cancelled = True
            self._detach(inbound, TransferError("ABORTED", f"{transfer_id}: the receiver cancelled it"))
            self.untold.pop(transfer_id, None)
        return inbound

    def end(self, inbound: Inbound, error: TransferError) -> None:
        if inbound.transfer_id in self.live:
            inbound.error = error
            self._detach(inbound, error)
            self.untold[inbound.transfer_id] = inbound
            if not inbound.landing:
                self.announce(inbound)

    def linked(self, sender: str) -> None:
        """One more link of this incarnation."""
        self._links[sender] += 1

    def lost(self, sender: str, error: TransferError) -> None:
        """One link less: with an incarnation's last one ends what it alone might have begun."""
        self._links[sender] -= 1
        if self._links[sender] == 0:
            del self._links[sender]
            for inbound in [i for i in self.live.values() if i.link is None and i.sender == sender]:
                self.end(inbound, error)

    def commit(self, inbound: Inbound, payload: bytes) -> None:
        inbound.payload = payload
        self._detach(inbound, None)
        self.untold[inbound.transfer_id] = inbound
        self.announce(inbound)

    def announce(self, inbound: Inbound) -> None:
        """No copy is under way any more: its owner may know."""
        (inbound.link.endings if inbound.link else self.endings).append(inbound)

    def told(self, inbound: Inbound) -> None:
        if self.untold.get(inbound.transfer_id) is inbound:
            del self.untold[inbound.transfer_id]

    def tick(self, now: float) -> None:
        for inbound in [i for i in self.live.values() if now >= i.deadline]:
            self.end(inbound, TransferError("DEADLINE_EXCEEDED", f"{inbound.transfer_id}: deadline passed"))

    def _detach(self, inbound: Inbound, error: TransferError | None) -> None:
        self.live.pop(inbound.transfer_id, None)
        if inbound.link is not None:
            inbound.link.release(inbound, error)
