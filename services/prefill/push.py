"""One sequence's KV on its way out, seen by the trace: the engine's sink around a transfer's Push."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import torch
from opentelemetry import trace
from opentelemetry.trace import Span, Status, StatusCode

from tandem.transfer import Link, Push, TransferError

tracer = trace.get_tracer("tandem.prefill")


class TracedPush:
    """A KVSink that records a `kv.transfer` span from the first layer pushed to the receiver's ack.

    `moved` is told how many tokens' KV it moved, and the seconds that took: in pushes, and from the commit to the ack.
    """

    def __init__(self, push: Push, link: Link, parent: Span, moved: Callable[[int, float], None]) -> None:
        self._push = push
        self._link = link
        self._parent = parent
        self._moved = moved
        self._span: Span | None = None
        self._blocks = 0
        self._layers = 0
        self._tokens = 0
        self._seconds = 0.0
        self.first_push_at: float | None = None
        self.failure: TransferError | None = None

    @property
    def bytes_sent(self) -> int:
        return self._push.bytes_sent

    def push(self, layer: int, first_block: int, block_ids: Sequence[int], kv: torch.Tensor) -> None:
        if self._span is None:
            self.first_push_at = time.monotonic()
            self._span = tracer.start_span("kv.transfer", trace.set_span_in_context(self._parent))
        if layer == 0:
            self._blocks += len(block_ids)
            self._tokens += len(block_ids) * kv.shape[3]
            self._parent.add_event("chunk", {"first_block": first_block, "blocks": len(block_ids)})
        self._layers = max(self._layers, layer + 1)
        started = time.monotonic()
        try:
            self._push.push(layer, first_block, block_ids, kv)
        except TransferError as error:
            self.failure = error
            raise
        self._seconds += time.monotonic() - started

    def commit(self, payload: bytes) -> Future[None]:
        self._seconds -= time.monotonic()
        committed = self._push.commit(payload)
        committed.add_done_callback(self._ended)
        return committed

    def abort(self, reason: str) -> None:
        self._push.abort(reason)
        self._end(reason)

    def _ended(self, committed: Future[None]) -> None:
        error = None if committed.cancelled() else committed.exception()
        if error is None and self._tokens:
            self._moved(self._tokens, self._seconds + time.monotonic())
        self._end(str(error) if error else "")

    def _end(self, error: str) -> None:
        span, self._span = self._span, None
        if span is None:
            return
        span.set_attributes(
            {
                "kv.transfer.bytes": self._push.bytes_sent,
                "kv.transfer.blocks": self._blocks,
                "kv.transfer.layers": self._layers,
                "kv.transfer.transport": self._link.transport,
                "kv.transfer.peer": self._link.remote.worker_id,
                "kv.transfer.peer_incarnation": self._link.remote.incarnation,
            }
        )
        if error:
            span.set_status(Status(StatusCode.ERROR, error))
        span.end()
