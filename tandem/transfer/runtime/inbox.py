"""A receiver's expected transfers behind one lock: the fence, and the callbacks that tell how each transfer ended."""

from __future__ import annotations

import logging
import threading
from collections import deque

from tandem.transfer.protocol.endpoint import TransferError
from tandem.transfer.protocol.landings import Inbound, InboundTable

FENCE_SECONDS = 5.0

_log = logging.getLogger(__name__)


class Inbox:
    """`changed` guards the table and every link's protocol; it is notified when a landing or a callback is over."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.table = InboundTable()

    def cancel(self, transfer_id: str) -> None:
        """When it returns, nothing of this transfer is being or will be written, and no callback runs or will run."""

        me = threading.get_ident()
        with self.changed:
            inbound = self.table.cancel(transfer_id)
            if inbound is None:
                return
            held = inbound
            if not self.changed.wait_for(lambda: not held.landing and held.caller in (0, me), FENCE_SECONDS):
                text = f"cancel {transfer_id}: a write or a callback is still running after {FENCE_SECONDS} s"
                raise TransferError("DEADLINE_EXCEEDED", text)

    def tell(self, endings: deque[Inbound]) -> None:
        """Runs the callbacks of transfers that have ended, in order, without the lock."""
        while inbound := self._next(endings):
            failure = self._call(inbound)
            with self.changed:
                inbound.caller = 0
                self.table.told(inbound)
                if inbound.payload is not None and inbound.link:
                    self._answer(inbound, failure)
                self.changed.notify_all()

    def _next(self, endings: deque[Inbound]) -> Inbound | None:
        with self.changed:
            while endings:
                inbound = endings.popleft()
                if not inbound.cancelled:
                    inbound.caller = threading.get_ident()
                    return inbound
        return None

    def _call(self, inbound: Inbound) -> str:
        """Why the callback failed; empty when it did not."""
        try:
            if inbound.payload is not None:
                inbound.on_commit(inbound.payload, inbound.bytes_received)
            elif inbound.error:
                inbound.on_abort(inbound.error.code, inbound.error.message)
        except Exception as error:
            _log.exception("the callback of transfer %s failed", inbound.transfer_id)
            return f"{inbound.transfer_id}: on_commit failed: {error!r}"
        return ""

    def _answer(self, inbound: Inbound, failure: str) -> None:
        if inbound.link and failure:
            inbound.link.refuse(inbound.handle, TransferError("ABORTED", failure))
        elif inbound.link:
            inbound.link.acknowledge(inbound)
