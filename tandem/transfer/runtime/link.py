"""The sending side as a prefill worker sees it: a Link to one decode worker, and on it a Push for each sequence.

begin -> push (layer by layer, chunk by chunk) -> commit -> its future resolves: the receiver verified every frame
                                             \\-> abort: the receiver forgets the transfer
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from concurrent.futures import Future

import torch

from tandem.process import IntegrityReport
from tandem.transfer.copy.rows import Rows, Source
from tandem.transfer.protocol.endpoint import LinkPeer, TransferError
from tandem.transfer.protocol.sender import Outgoing
from tandem.transfer.protocol.wire import Fetch, KVSource
from tandem.transfer.runtime.connection import Connection
from tandem.transfer.runtime.sending_end import SendingEnd


class Push:
    """The transfer of one sequence's KV blocks. Only one thread may push; any thread may abort."""

    def __init__(self, end: SendingEnd, connection: Connection, outgoing: Outgoing) -> None:
        self._end, self._connection, self._outgoing = end, connection, outgoing
        self._block_bytes, self._frame_blocks = end.slots.block_bytes, end.slots.blocks
        self._source = Source()

    @property
    def bytes_sent(self) -> int:
        """The KV bytes that were gathered and queued so far."""
        return self._outgoing.bytes_sent

    @property
    def bytes_pushed(self) -> int:
        """The KV bytes of all blocks pushed so far, including blocks that wait to be gathered."""
        return self._outgoing.coverage.num_seen * self._block_bytes

    @property
    def reading(self) -> bool:
        """True while pushed blocks may still be read and must not change. Only for the pushing thread."""
        return self._outgoing.reading

    def push(self, layer: int, first_block: int, block_ids: Sequence[int], kv: torch.Tensor) -> None:
        """Sends blocks `block_ids` of one layer's cache as logical blocks first_block, first_block + 1, ...

        kv: (num_blocks, 2, num_kv_heads, block_size, head_dim), contiguous. Blocks in this machine's memory are copied
        before `push` returns; it waits while the link's memory is full, at most until the transfer's deadline. Blocks
        on a device are copied once the device has computed them, and `push` does not wait: see `reading`. Raises
        TransferError.
        """
        rows = self._source.rows(layer, kv)
        ids = self._source.ids(block_ids, rows.count)
        try:
            self._check(rows)
            step = self._frame_blocks
            for start in range(0, len(ids), step):
                self._end.push(self._outgoing, layer, first_block + start, rows, ids[start : start + step])
                self._connection.flush()
        except TransferError:
            self._connection.flush()  # an ABORT may be queued
            raise

    def commit(self, payload: bytes) -> Future[None]:
        """Ends the transfer after its last push; `payload` reaches the receiver's on_commit. The call raises, or its
        future fails with, TransferError.

        The future resolves on the link's thread, so its callbacks must be short.
        """
        try:
            return self._end.commit(self._outgoing, payload)
        finally:
            self._connection.flush()

    def abort(self, reason: str) -> None:
        """Aborts the transfer, if it has not ended. The receiver's on_abort gets ABORTED and the reason."""
        self._end.abort(self._outgoing, TransferError("ABORTED", reason))
        self._connection.flush()

    def _check(self, rows: Rows) -> None:
        if rows.row_bytes != self._block_bytes:
            text = f"kv: a block has {rows.row_bytes} bytes here and {self._block_bytes} at the receiver"
            error = TransferError("FAILED_PRECONDITION", text)
            self._end.abort(self._outgoing, error)
            raise error.fresh()


class Link:
    """A warmed path to one incarnation of one decode worker; opened and owned by a Sender.

    opened: resolves to this link once the receiver has confirmed a first block.
    """

    def __init__(self, remote: LinkPeer, end: SendingEnd, connection: Connection, unusable: Mapping[str, str]) -> None:
        self.remote = remote
        self.opened: Future[Link] = Future()
        self.opened.set_running_or_notify_cancel()
        self._end, self._connection, self._unusable = end, connection, unusable

    @property
    def healthy(self) -> bool:
        return self.rtt > 0 and self._end.error is None and self._connection.alive

    @property
    def error(self) -> TransferError | None:
        """Why the link ended; None until its transfers have failed, which may be shortly after it is unhealthy."""
        return self._end.error

    @property
    def rtt(self) -> float:
        """The seconds that the opening probe took; 0 until its answer has come."""
        opened = self._end.opened
        return max(opened.result(), 1e-9) if opened.done() and opened.exception() is None else 0.0

    @property
    def transport(self) -> str:
        """The transport that the receiver has chosen; empty until then."""
        return self._end.welcome.transport if self._end.welcome else ""

    @property
    def refused(self) -> dict[str, str]:
        """The transports that the sender prefers but cannot use, with the reasons."""
        return {**self._unusable, **(self._end.welcome.refused if self._end.welcome else {})}

    @property
    def carrier(self) -> str:
        """The network that the transport itself chose for payloads; empty if it has no choice or reported none yet."""
        return self._end.carrier

    def probe(self, nbytes: int, *, timeout_s: float) -> Future[float]:
        """Sends `nbytes`; the future resolves to the seconds until the receiver confirmed them.

        Raises TransferError.
        """
        try:
            return self._end.probe(nbytes, timeout_s)
        finally:
            self._connection.flush()

    def begin(
        self, transfer_id: str, *, first_block: int, num_blocks: int, num_layers: int, timeout_s: float,
        source: KVSource = KVSource.COMPUTE,
    ) -> Push:  # fmt: skip
        """Opens a transfer of logical blocks [first_block, first_block + num_blocks), which the receiver expects.

        The transfer must be committed within `timeout_s`. Raises TransferError.
        """
        outgoing = self._end.begin(transfer_id, first_block, num_blocks, num_layers, timeout_s, source)
        self._connection.flush()
        return Push(self._end, self._connection, outgoing)

    def fetch(self, fetch: Fetch) -> None:
        """Asks the other worker to push blocks that it has cached to this worker's receiver. Raises TransferError."""
        try:
            self._end.fetch(fetch)
        finally:
            self._connection.flush()

    def check_integrity(self, accounted: Container[str]) -> IntegrityReport:
        return self._end.check_integrity(accounted)

    def start(self) -> None:
        """Starts the link. Only the Sender calls this, once."""
        self._end.opened.add_done_callback(self._opened)
        self._connection.start()

    def close(self, reason: str) -> None:
        """Ends the link soon; its transfers fail with UNAVAILABLE. Only the Sender calls this."""
        self._connection.close(TransferError("UNAVAILABLE", reason))

    def join(self) -> None:
        """Waits after `close`, for a bounded time, until the link has ended. Only the Sender calls this."""
        self._connection.join()

    def _opened(self, probed: Future[float]) -> None:
        if error := probed.exception():
            self.close("the link did not open")
            self.opened.set_exception(error)
        else:
            self.opened.set_result(self)
