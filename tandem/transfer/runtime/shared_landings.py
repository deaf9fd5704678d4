"""A receiver's expected transfers, shared by its links: one lock, fences, and the callbacks that report each end."""

from __future__ import annotations

import logging
import threading
from collections import deque
from concurrent.futures import Future

from tandem.transfer.protocol.endpoint import TransferError
from tandem.transfer.protocol.landings import Landing, Landings

_log = logging.getLogger(__name__)


class SharedLandings:
    """The table of landings. `lock` guards the table and every link's protocol."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.table = Landings()

    def cancel(self, transfer_id: str) -> Future[None]:
        fence: Future[None] = Future()
        fence.set_running_or_notify_cancel()
        with self.lock:
            self.table.cancel(transfer_id, fence)
        self._resolve_fences()
        return fence

    def report(self, ended: deque[Landing]) -> None:
        """Runs the callbacks of ended transfers, in order, without the lock; then resolves fences."""
        while landing := self._next(ended):
            failure = self._call(landing)
            with self.lock:
                self.table.reported(landing)
                if landing.payload is not None and landing.link:
                    self._answer(landing, failure)
        self._resolve_fences()

    def _next(self, ended: deque[Landing]) -> Landing | None:
        with self.lock:
            while ended:
                landing = ended.popleft()
                if not landing.cancelled:
                    landing.calling = True
                    return landing
        return None

    def _call(self, landing: Landing) -> str:
        """Calls the transfer's callback. Returns why it failed; empty if it did not."""
        try:
            if landing.payload is not None:
                landing.on_commit(landing.payload, landing.bytes_received)
            elif landing.error:
                landing.on_abort(landing.error.code, landing.error.message)
        except Exception as error:
            _log.exception("the callback of transfer %s failed", landing.transfer_id)
            return f"{landing.transfer_id}: on_commit failed: {error!r}"
        return ""

    def _answer(self, landing: Landing, failure: str) -> None:
        if landing.link and failure:
            landing.link.refuse(landing.handle, TransferError("ABORTED", failure))
        elif landing.link:
            landing.link.acknowledge(landing)

    def _resolve_fences(self) -> None:
        while self.table.fenced:
            with self.lock:
                landing = self.table.fenced.popleft() if self.table.fenced else None
            for fence in landing.fences if landing else ():
                fence.set_result(None)
