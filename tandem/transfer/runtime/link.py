"""What a prefill worker holds: a Link to one decode worker, and on it a Push for each sequence.

begin -> push (layer by layer, chunk by chunk) -> commit -> its future resolves: every frame verified there
                                             \\-> abort: the receiver forgets the transfer
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Future

import torch

from tandem.clock import Clock
from tandem.transfer.copy.rows import Rows, Source
from tandem.transfer.protocol.endpoint import Endpoint, TransferError
from tandem.transfer.protocol.sender import Outgoing
from tandem.transfer.runtime.connection import Channel
from tandem.transfer.runtime.sending_end import Outlet


class Push:
    """One sequence's KV blocks on their way. One thread pushes; any thread may abort."""

    def __init__(self, outlet: Outlet, channel: Channel, outgoing: Outgoing) -> None:
        self._outlet, self._channel, self._outgoing = outlet, channel, outgoing
        self._block_bytes, self._frame_blocks = outlet.slots.block_bytes, outlet.slots.blocks
        self._source = Source()

    @property
    def bytes_sent(self) -> int:
        """KV bytes gathered and queued so far."""
        return self._outgoing.bytes_sent

    def push(self, layer: int, first_block: int, block_ids: Sequence[int], kv: torch.Tensor) -> None:
        """Sends blocks `block_ids` of one layer's cache as logical blocks first_block, first_block + 1, ...

        kv: (num_blocks, 2, num_kv_heads, block_size, head_dim), contiguous. Its bytes are copied before this returns.
        Waits while the link's arena is full, at most to the transfer's deadline. Raises TransferError.
        """
        rows = self._source.rows(layer, kv)
        ids = self._source.ids(block_ids, rows.count)
        try:
            self._check(rows)
            step = self._frame_blocks
            for start in range(0, len(ids), step):
                self._outlet.push(self._outgoing, layer, first_block + start, rows, ids[start : start + step])
                self._channel.flush()
        except TransferError:
            self._channel.flush()  # an ABORT may be waiting to go out
            raise

    def commit(self, payload: bytes) -> Future[None]:
        """Call after the last push; `payload` reaches the receiver's on_commit. Raises, or fails with, TransferError.

        The future resolves on the link's thread: what its callbacks do must be short.
        """
        try:
            return self._outlet.commit(self._outgoing, payload)
        finally:
            self._channel.flush()

    def abort(self, reason: str) -> None:
        """Idempotent. The receiver's on_abort hears ABORTED and the reason."""
        self._outlet.abort(self._outgoing, TransferError("ABORTED", reason))
        self._channel.flush()

    def _check(self, rows: Rows) -> None:
        if rows.row_bytes != self._block_bytes:
            text = f"kv: a block has {rows.row_bytes} bytes here and {self._block_bytes} at the receiver"
            error = TransferError("FAILED_PRECONDITION", text)
            self._outlet.abort(self._outgoing, error)
            raise error.fresh()


class Link:
    """A warmed path to one incarnation of one decode worker; opened and owned by a Sender.

    rtt: seconds that the opening probe, one block there and its answer back, took.
    """

    def __init__(self, remote: Endpoint, outlet: Outlet, channel: Channel, clock: Clock) -> None:
        self.remote = remote
        self.transport = ""
        self.rtt = 0.0
        self._outlet, self._channel, self._clock = outlet, channel, clock

    @property
    def healthy(self) -> bool:
        return bool(self.transport) and self._outlet.error is None and self._channel.alive

    @property
    def error(self) -> TransferError | None:
        """Why the link ended; None while it lives."""
        return self._outlet.error

    def probe(self, nbytes: int, *, timeout: float) -> float:
        """Seconds until `nbytes` have gone over and the receiver has said that it saw them. Raises TransferError."""
        start = self._clock.now()
        deadline = start + timeout
        pattern, handles = os.urandom(4096), set()
        step = self._outlet.slots.blocks * self._outlet.slots.block_bytes
        for offset in range(0, nbytes, step):
            size = min(step, nbytes - offset)
            handles.add(self._outlet.probe((pattern * (size // 4096 + 1))[:size], deadline))
            self._channel.flush()
        if not self._outlet.probed(handles, deadline):
            raise TransferError("DATA_LOSS", f"probe: {self.remote} saw other bytes than were sent")
        return self._clock.now() - start

    def begin(self, transfer_id: str, *, first_block: int, num_blocks: int, num_layers: int, deadline: float) -> Push:
        """Opens a transfer of logical blocks [first_block, first_block + num_blocks), which the receiver expects.

        deadline: of this process's clock. Raises TransferError.
        """
        outgoing = self._outlet.begin(transfer_id, first_block, num_blocks, num_layers, deadline)
        self._channel.flush()
        return Push(self._outlet, self._channel, outgoing)

    def open(self, timeout: float) -> None:
        """For the Sender: shakes hands and moves one block. Raises TransferError."""
        deadline = self._clock.now() + timeout
        self._channel.start()
        welcome = self._outlet.opened(deadline)
        self.rtt = self.probe(welcome.block_bytes, timeout=deadline - self._clock.now())
        self.transport = welcome.transport

    def close(self, reason: str) -> None:
        """For the Sender: ends the link; every transfer on it fails with UNAVAILABLE."""
        self._channel.close(TransferError("UNAVAILABLE", reason))
