"""The sequences of a prefill worker. The life of a sequence:

1 link      to the ticket's decode worker, which is opened if necessary
  fetch     cached KV of the prompt, from the worker that the gateway names, if any, and from the tiers
2 queue     until the engine schedules the prompt
3 compute   in chunks; each layer of each chunk is pushed as it is computed
4 commit    the first token is sampled: it is sent to the decode worker after the KV, and to the caller

An earlier end aborts the push, which releases the landing blocks, and removes the sequence from the engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from opentelemetry import trace
from opentelemetry.trace import Span

from services.prefill.metrics import TransferMetrics
from services.prefill.push import TracedPush
from tandem.catalogue.spans import TRUNCATED
from tandem.engine import Engine, Request, SequenceOutput
from tandem.transfer import Link, LinkPeer, TransferError
from tandem.worker import Added, Ended, EnginePort, Event, Holder, KVFetcher, LinkTo, SequenceFailed

tracer = trace.get_tracer("tandem.prefill")


@dataclass(frozen=True, slots=True)
class Ticket:
    """A decode worker's permission to write a prompt's KV to certain blocks."""

    transfer_id: str
    decode: LinkPeer
    address: str
    num_cached_blocks: int
    num_prompt_blocks: int


@dataclass(frozen=True, slots=True)
class Prefilled:
    """A first token, and how it was made."""

    output: SequenceOutput
    transfer_bytes: int
    transport: str
    refused_transports: dict[str, str]
    fetched_tokens: int = 0


class PrefillSequences:
    """The sequences of this worker.

    `link_to` opens links; `fetcher` fetches cached KV. `payload` encodes the first token for the decode
    worker; `now` works on any thread.
    """

    def __init__(
        self,
        engine: EnginePort,
        link_to: LinkTo,
        fetcher: KVFetcher,
        *,
        payload: Callable[[SequenceOutput], bytes],
        now: Callable[[], float],
        worker_id: str,
        metrics: TransferMetrics,
    ) -> None:
        self._engine, self._link_to, self._fetcher = engine, link_to, fetcher
        self._payload, self._now, self._worker_id = payload, now, worker_id
        self._metrics = metrics
        self._computing: dict[str, asyncio.Future[SequenceOutput]] = {}
        self._pushing: set[str] = set()

    def __len__(self) -> int:
        return len(self._computing)

    def request_ids(self) -> set[str]:
        return set(self._computing)

    def transfer_ids(self) -> set[str]:
        """Returns the ids of the pushes that are not committed yet."""
        return set(self._pushing)

    async def prefill(
        self, request: Request, ticket: Ticket, timeout_s: float, holder: Holder | None = None
    ) -> Prefilled:
        """Prefills a prompt and pushes its KV to the ticket's decode worker. Returns the first token.

        Raises SequenceFailed.
        """
        with tracer.start_as_current_span("prefill") as span, _truncated_if_raised(span):
            span.set_attribute("tandem.worker", self._worker_id)
            try:
                async with asyncio.timeout(timeout_s):
                    return await self._prefill(request, ticket, timeout_s, holder, span)
            except TimeoutError:
                raise SequenceFailed("DEADLINE_EXCEEDED", "the request's deadline passed in prefill") from None
            except TransferError as error:
                raise SequenceFailed(error.code, f"KV transfer: {error}") from None

    async def embed(self, request: Request, timeout_s: float) -> SequenceOutput:
        """Computes the embedding of a request's prompt. Raises SequenceFailed."""
        with tracer.start_as_current_span("embed") as span, _truncated_if_raised(span):
            span.set_attributes({"tandem.worker": self._worker_id, "prefill.tokens": len(request.token_ids)})
            try:
                async with asyncio.timeout(timeout_s):
                    await self._engine.prepare(request, timeout_s)
                    return await self._compute(request, None)
            except TimeoutError:
                raise SequenceFailed("DEADLINE_EXCEEDED", "the request's deadline passed in prefill") from None

    async def abort(self, request_id: str) -> None:
        """Removes a sequence whose `prefill` was cancelled from the engine; returns when it holds nothing any more."""
        await self._engine.call(lambda engine: engine.abort(request_id))

    def on_events(self, events: Sequence[Event]) -> None:
        for event in events:
            computed = self._computing.get(event.request_id)
            if computed is None or computed.done():
                continue
            if isinstance(event, SequenceOutput):
                computed.set_result(event)
            elif isinstance(event, Ended) and event.error:
                computed.set_exception(event.error)

    async def _prefill(
        self, request: Request, ticket: Ticket, timeout_s: float, holder: Holder | None, span: Span
    ) -> Prefilled:
        start = self._now()
        link = await self._linked(ticket)
        push = self._begin(link, ticket, timeout_s, span)
        self._pushing.add(ticket.transfer_id)
        try:
            # After `_begin`, as the decode worker waits only briefly for a push to begin, and reading an adapter may
            # take longer.
            await self._engine.prepare(request, timeout_s)
            fetched = await self._fetcher.complete(request, holder, timeout_s)
            output = await self._compute(request, push, ticket.num_cached_blocks)
            push.commit(self._payload(output))
        except BaseException as error:
            push.abort(f"prefill ended: {type(error).__name__}")
            if isinstance(error, TransferError):
                self._metrics.failed(link.remote.worker_id, link.transport, error.code)
            raise
        finally:
            self._pushing.discard(ticket.transfer_id)
        computing = push.first_push_at or self._now()
        span.set_attributes(
            {
                "prefill.tokens": len(request.token_ids),
                "prefill.cached_tokens": output.num_cached_tokens,
                "prefill.queue_s": computing - start,
            }
        )
        return Prefilled(output, push.bytes_pushed, link.transport, link.refused, fetched)

    async def _linked(self, ticket: Ticket) -> Link:
        try:
            return await self._link_to(ticket.decode, ticket.address)
        except TransferError as error:
            self._metrics.failed(ticket.decode.worker_id, "none", error.code)
            raise

    def _begin(self, link: Link, ticket: Ticket, timeout_s: float, span: Span) -> TracedPush:
        push = link.begin(
            ticket.transfer_id,
            first_block=ticket.num_cached_blocks,
            num_blocks=ticket.num_prompt_blocks - ticket.num_cached_blocks,
            num_layers=self._engine.engine.layout.num_layers,
            timeout_s=timeout_s,
        )
        moved = partial(self._engine.rates.moved, link.remote.worker_id)
        return TracedPush(push, link, span, moved, self._now, self._metrics)

    async def _compute(self, request: Request, push: TracedPush | None, first_block: int = 0) -> SequenceOutput:
        request_id = request.request_id
        if request_id in self._computing:
            raise SequenceFailed("ALREADY_EXISTS", f"request_id: {request_id!r} is being prefilled")
        computed: asyncio.Future[SequenceOutput] = asyncio.get_running_loop().create_future()
        self._computing[request_id] = computed

        def add(engine: Engine) -> Sequence[Event]:
            engine.add(request, sink=push, first_block=first_block, prefill_only=True)
            return [Added(request_id)]

        def abort(engine: Engine) -> Sequence[Event]:
            engine.abort(request_id)
            return [Ended(request_id)]

        try:
            self._engine.submit_with_turn(request_id, add)
            output = await computed
        except ValueError as error:
            raise SequenceFailed("INVALID_ARGUMENT", str(error)) from None
        except BaseException:
            self._engine.submit_with_turn(request_id, abort)
            raise
        finally:
            del self._computing[request_id]
        if push is not None and push.failure is not None:
            raise push.failure
        if output.error:
            raise SequenceFailed("INTERNAL", output.error)
        return output


@contextmanager
def _truncated_if_raised(span: Span) -> Iterator[None]:
    try:
        yield
    except BaseException:
        span.set_attribute(TRUNCATED, True)
        raise
