"""The traced push of one sequence's KV: the engine's sink, which wraps a transfer's Push.

    kv.transfer span   |-- push, push, push, … --|            |-- commit -> ack --|
    the engine         |== layer by layer =========== sample ==|
                                                               |<--- exposed ----->|
                                                 |<-------- tail ----------------->|

The span lasts from the first push until the receiver has verified every frame and decode may start. Its attributes are
described in tandem/catalogue/spans.py. Each push is an event `layer` of the span; each chunk is an event `chunk` of its
parent.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import torch
from opentelemetry import trace
from opentelemetry.trace import Span, Status, StatusCode

from services.prefill.metrics import Seconds, TransferMetrics
from tandem.catalogue.spans import TRUNCATED
from tandem.transfer import Link, Push, TransferError

tracer = trace.get_tracer("tandem.prefill")


class TracedPush:
    """A KVSink that records a `kv.transfer` span from the first layer pushed to the receiver's ack.

    `moved` is called with the number of tokens moved and the seconds that took: in pushes, and from the commit to the
    ack.
    """

    def __init__(
        self, push: Push, link: Link, parent: Span, moved: Callable[[int, float], None], now: Callable[[], float],
        metrics: TransferMetrics,
    ) -> None:  # fmt: skip
        self._push = push
        self._now = now
        self._link = link
        self._parent = parent
        self._moved, self._metrics = moved, metrics
        self._span: Span | None = None
        self._first = sys.maxsize
        self._blocks = 0
        self._layers = 0
        self._tokens = 0
        self._push_s = 0.0
        self._last_push_at = 0.0
        self._committed_at: float | None = None
        self.first_push_at: float | None = None
        self.failure: TransferError | None = None

    @property
    def bytes_pushed(self) -> int:
        return self._push.bytes_pushed

    @property
    def reading(self) -> bool:
        return self._push.reading

    def push(self, layer: int, first_block: int, block_ids: Sequence[int], kv: torch.Tensor) -> None:
        start = self._now()
        span = self._span or self._start(start)
        # Layers with a window have only the prompt's last blocks.
        self._first = min(self._first, first_block)
        self._blocks = max(self._blocks, first_block + len(block_ids) - self._first)
        self._tokens = self._blocks * kv.shape[3]
        if layer == 0:
            self._parent.add_event("chunk", {"first_block": first_block, "blocks": len(block_ids)})
        self._layers = max(self._layers, layer + 1)
        try:
            self._push.push(layer, first_block, block_ids, kv)
        except TransferError as error:
            self.failure = error
            raise
        self._last_push_at = self._now()
        push_s = self._last_push_at - start
        self._push_s += push_s
        if span.is_recording():
            told = {"layer": layer, "push_s": push_s, "first_block": first_block, "blocks": len(block_ids)}
            span.add_event("layer", told)

    def commit(self, payload: bytes) -> Future[None]:
        self._committed_at = self._now()
        committed = self._push.commit(payload)
        committed.add_done_callback(self._ended)
        return committed

    def abort(self, reason: str) -> None:
        self._push.abort(reason)
        self._end(reason)

    def _start(self, now: float) -> Span:
        self.first_push_at = now
        self._span = tracer.start_span("kv.transfer", trace.set_span_in_context(self._parent))
        return self._span

    def _ended(self, committed: Future[None]) -> None:
        error = None if committed.cancelled() else committed.exception()
        now, peer, transport = self._now(), self._link.remote.worker_id, self._link.transport
        if isinstance(error, TransferError):
            self._metrics.failed(peer, transport, error.code)
        if error is None and self._tokens and self._committed_at and self.first_push_at is not None:
            exposed_s = now - self._committed_at
            self._moved(self._tokens, self._push_s + exposed_s)
            spent = Seconds(now - self.first_push_at, exposed_s, self._push_s)
            self._metrics.landed(peer, transport, self._push.bytes_sent, spent)
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
                **{f"kv.transfer.refused.{name}": why for name, why in self._link.refused.items()},
                **({"kv.transfer.carrier": self._link.carrier} if self._link.carrier else {}),
                "kv.transfer.peer": self._link.remote.worker_id,
                "kv.transfer.peer_incarnation": self._link.remote.incarnation,
                "kv.transfer.push_s": self._push_s,
                **self._exposed(self._now()),
            }
        )
        if error:
            span.set_status(Status(StatusCode.ERROR, error))
            span.set_attribute(TRUNCATED, True)
        span.end()

    def _exposed(self, now: float) -> dict[str, float]:
        if self._committed_at is None or self.first_push_at is None:
            return {}
        exposed, whole = now - self._committed_at, now - self.first_push_at
        return {
            "kv.transfer.exposed_s": exposed,
            "kv.transfer.tail_s": now - self._last_push_at,
            "kv.transfer.overlap_ratio": 1 - exposed / whole if whole else 0.0,
        }
