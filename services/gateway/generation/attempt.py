"""One try of one choice on one pair of workers.

    route     (P, D) chosen and reserved                                  registry
    reserve   D's stream open, blocks held; a ticket, or D prefills       Reservation
    prefill   P's reply carries the first token                           Prefill
    decode    the other tokens come by D's stream
    end       P and D abort sequences that have not ended; the reservation is released

`end` frees everything, however the attempt ended. Slow parts run in background tasks, which no cancellation stops.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from typing import Any

import structlog
from opentelemetry.trace import Span, SpanKind, Tracer

from services.gateway.admission import SequenceTurns
from services.gateway.deadlines import Deadlines, Entry
from services.gateway.errors import TimedOut, Unavailable, WorkerLost
from services.gateway.generation import tracing
from services.gateway.generation.choice import Choice
from services.gateway.generation.recovery.convictions import Convictions
from services.gateway.generation.recovery.suspicion import Deaths
from services.gateway.routing import Router, RouteRequest
from services.gateway.workers import Mailbox, Tokens, WorkerConnection, WorkerPool
from tandem.registry import Route, WorkerInfo
from tandem.v1 import llm_pb2, worker_pb2

log = structlog.get_logger(__name__)
# After a last token from P, D gets this long to end the sequence itself, which keeps its blocks as cache.
LINGER_S = 1.0
ABORT_TIMEOUT_S = 2.0
# Lower bound of what is left of a TTFT target; 0 would mean no target.
LEAST_LEFT_S = 0.001
WORKER_LOST = "worker_lost"


@dataclass(frozen=True, slots=True)
class ClusterAccess:
    """The cluster as an attempt uses it. `in_background` runs something to its end apart from the request."""

    router: Router
    pool: WorkerPool
    spans: Tracer
    in_background: Callable[[Awaitable[Any]], None]
    deadlines: Deadlines
    turns: SequenceTurns
    deaths: Deaths
    convictions: Convictions = field(default_factory=Convictions)


class Attempt:
    """One try of a choice. Read `tokens` once, then call `end` once."""

    def __init__(self, cluster: ClusterAccess, choice: Choice) -> None:
        self._cluster, self._choice = cluster, choice
        self._sequence, self._deadline, self._parent = choice.sequence, choice.request.deadline, choice.parent
        self._now = asyncio.get_running_loop().time
        self._route: Route | None = None
        self._connections: list[WorkerConnection] = []
        self._mailbox: Mailbox | None = None
        self._reserving = False
        self._aborts: dict[asyncio.Future[Any], str] = {}  # ids of the workers asked to abort
        self._timer: Entry | None = None
        self.span: Span | None = None  # span of the current hop

    def lost_incarnations(self, error: WorkerLost) -> set[str]:
        """Returns the incarnations that the error is about: the worker it names, and a decode worker whose stream
        broke.
        """
        mailbox, route = self._mailbox, self._route
        if route is None:
            return set()
        infos = [route.decode.info] + ([route.prefill.info] if route.prefill else [])
        lost = {info.incarnation for info in infos if info.worker_id == error.worker_id}
        broke = mailbox is not None and mailbox.error is not None and not mailbox.ended
        return lost | ({route.decode.info.incarnation} if broke else set())

    def crashed(self, error: WorkerLost) -> set[str]:
        """Returns the incarnations whose process may have died while it computed this attempt."""
        errors = [error, self._mailbox.error] if self._mailbox else []
        ended = {one.worker_id for one in errors if isinstance(one, WorkerLost) and one.ended}
        infos = [place.info for place in (self._route.decode, self._route.prefill) if place] if self._route else []
        return {info.incarnation for info in infos if info.worker_id in ended}

    async def tokens(self, exclude: Collection[str]) -> AsyncGenerator[Tokens, None]:
        """Yields new tokens that the choice has not taken on delivery; an empty piece where it has no room for more.

        Ends once the choice's finish_reason is set. Raises GatewayError.
        """
        route, choice = await self._choose(exclude), self._choice
        decode = self._use(route.decode.info)
        hop = tracing.child(self._cluster.spans, "decode", self._parent, is_at_fault=lambda span: span is self.span)
        with hop as span:  # from the reservation on: the worker's own span lies within
            try:
                mailbox, ticket = await self._reserve(decode, route.prefill.info if route.prefill else None, span)
                if route.prefill is not None:
                    yield await self._prefill(self._use(route.prefill.info), ticket, mailbox)
                self.span = span
                while not mailbox.finish_reason:
                    begun = mailbox.next_index > self._sequence.num_prior_tokens
                    tokens = await mailbox.get(choice.take if begun and choice.write else None)
                    self._note_progress(route, mailbox, tokens)
                    yield tokens
            finally:  # readers stop at the last token, and lost attempts decoded some
                self._note_decoded(span)
        if mailbox.finish_reason == llm_pb2.FINISH_REASON_ABORT:
            raise WorkerLost(route.decode.info.worker_id, "it aborted the sequence")

    def end(self) -> None:
        """Free everything that this attempt holds, here and on workers; in the background if workers must confirm."""
        if self._timer:
            self._timer.cancel()
        mailbox = self._mailbox
        if mailbox is not None and (self._aborts or (self._reserving and not _has_ended(mailbox))):
            self._cluster.in_background(self._hear_end(mailbox))
        else:
            self._let_go()

    async def _hear_end(self, mailbox: Mailbox) -> None:
        """Wait, within a bound, until the workers have ended the attempt."""
        if self._reserving and not await self._ends_by_itself(mailbox):
            self._abort(self._connections[0], mailbox)
        await self._aborted(mailbox)
        self._let_go()

    def _let_go(self) -> None:
        if self._mailbox is not None:
            self._connections[0].stream.detach(self._mailbox)
        for connection in self._connections:
            connection.running -= 1
        if self._route is not None:
            self._cluster.in_background(self._cluster.router.release(self._route))

    # --- the steps ---

    async def _choose(self, exclude: Collection[str]) -> Route:
        sequence, cluster, left = self._sequence, self._cluster, self._left()
        max_new_tokens = sequence.sampling.max_tokens - sequence.num_prior_tokens
        request = RouteRequest(
            sequence.request_id, sequence.token_ids, sequence.cache_salt, max_new_tokens, left + 1.0,
            sequence.adapter.revision, self._choice.holder, self._left_to_first(), sequence.itl_target_ms / 1000,
        )  # fmt: skip
        with tracing.child(cluster.spans, "route", self._parent) as span:
            began = self._now()
            try:
                with cluster.deadlines.until(self._deadline):
                    await cluster.turns.begin(len(sequence.token_ids))
                    route = self._route = await self._answering(request, exclude)
            except TimeoutError:
                raise TimedOut("the request's deadline passed while choosing workers") from None
            self._choice.meter.routed(self._now() - began)
            self._note_route(route)
            span.set_attribute("tandem.path.reason", route.reason)
        return route

    async def _answering(self, request: RouteRequest, exclude: Collection[str]) -> Route:
        """Returns a route among workers that answer now, else also silent ones; a first attempt may also wait for lost
        ones.
        """
        pool, exclude = self._cluster.pool, self._cluster.pool.foreign | set(exclude)
        lost, doubtful, back_soon = pool.lost(), pool.doubtful(), not self._choice.migrated
        silent = lost | pool.unmet()
        *tiers, last = dict.fromkeys(map(frozenset, (silent | doubtful, silent, () if back_soon else lost)))
        for left_out in tiers:
            with suppress(Unavailable):
                return await self._cluster.router.choose(request, left_out | exclude)
        return await self._cluster.router.choose(request, last | exclude)

    async def _reserve(
        self, decode: WorkerConnection, prefill: WorkerInfo | None, decoding: Span
    ) -> tuple[Mailbox, worker_pb2.LandingTicket]:
        """Returns the mailbox and ticket of a reservation on the decode worker.

        `decoding`: the worker's parent span.
        """
        with tracing.child(self._cluster.spans, "reserve", self._parent, SpanKind.CLIENT) as span:
            self.span = span
            span.set_attribute("tandem.worker", decode.info.worker_id)
            await decode.stream.wait_open(self._deadline)
            mailbox = decode.stream.attach(self._sequence.request_id, self._sequence.num_prior_tokens)
            self._mailbox = self._choice.mailbox = mailbox
            late = TimedOut("the request's deadline passed")
            self._timer = self._cluster.deadlines.add(self._deadline, mailbox.fail, late)
            reservation = worker_pb2.Reservation(
                sequence=self._asked(decoding),
                local_prefill=prefill is None,
                prefill_incarnation=prefill.incarnation if prefill else "",
                holder=None if prefill else self._holder(),
            )
            reply = decode.stream.reserve(reservation)
            self._reserving = True
            reserved: worker_pb2.Reserved = await mailbox.answered(reply)
            self._note_fetched(reserved.fetched_tokens)
        return mailbox, reserved.ticket

    async def _prefill(self, prefill: WorkerConnection, ticket: worker_pb2.LandingTicket, mailbox: Mailbox) -> Tokens:
        with tracing.child(self._cluster.spans, "prefill", self._parent, SpanKind.CLIENT) as span:
            self.span = span
            span.set_attribute("tandem.worker", prefill.info.worker_id)
            await prefill.stream.wait_open(self._deadline)
            asked = worker_pb2.Prefill(sequence=self._asked(span), ticket=ticket, holder=self._holder())
            reply = prefill.stream.prefill(asked)
            try:
                response: worker_pb2.Prefilled = await mailbox.answered(reply)
            except WorkerLost as error:
                if not mailbox.ended:
                    raise
                # The decode worker reported this end itself, so it is alive, and the prefill worker was lost.
                raise WorkerLost(prefill.info.worker_id, error.message, ended=True) from None
            finally:
                if not reply.done():
                    self._abort(prefill, mailbox)
            self._note_prefilled(response)
            span.set_attribute("kv.transfer.bytes", response.transfer_bytes)
        tokens = mailbox.accept(response.output)
        assert self._route is not None
        self._note_progress(self._route, mailbox, tokens)
        return tokens

    def _holder(self) -> worker_pb2.CacheHolder | None:
        if self._route is None or self._route.holder is None:
            return None
        info = self._route.holder.info
        return worker_pb2.CacheHolder(
            worker=info.worker_id, incarnation=info.incarnation, transfer_address=info.transfer_address
        )

    def _abort(self, connection: WorkerConnection, mailbox: Mailbox) -> None:
        self._aborts[connection.stream.abort(mailbox.request_id)] = connection.info.worker_id

    async def _aborted(self, mailbox: Mailbox) -> None:
        """Wait until each worker confirms that it holds nothing."""
        if not self._aborts:
            return
        _, late = await asyncio.wait(self._aborts, timeout=ABORT_TIMEOUT_S)
        for reply in late:
            log.warning("sequence not aborted", request_id=mailbox.request_id, worker=self._aborts[reply])

    async def _ends_by_itself(self, mailbox: Mailbox) -> bool:
        if mailbox.finish_reason and not mailbox.ended:
            await self._linger(mailbox)
        return _has_ended(mailbox)

    async def _linger(self, mailbox: Mailbox) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                await mailbox.wait_ended()

    # --- bounds ---

    def _left(self) -> float:
        left = self._deadline - self._now()
        if left <= 0:
            raise TimedOut("the request's deadline passed")
        return left

    def _left_to_first(self) -> float:
        """Returns the seconds left of the TTFT target; 0 without a target, or after the first token."""
        if self._sequence.num_prior_tokens:
            return 0.0
        by = self._choice.first_by
        return 0.0 if by == inf else max(by - self._now(), LEAST_LEFT_S)

    def _asked(self, span: Span) -> worker_pb2.SequenceSpec:
        """Returns the sequence to send to a worker now, with what is left of its deadline and this span's context."""
        sequence = self._sequence
        sequence.timeout_ms = max(1, int(self._left() * 1000))
        sequence.trace_context.clear()
        sequence.trace_context.update(tracing.outgoing(span))
        return sequence

    # --- notes ---

    def _use(self, info: WorkerInfo) -> WorkerConnection:
        connection = self._cluster.pool.connection(info)
        connection.running += 1
        self._connections.append(connection)
        return connection

    def _note_route(self, route: Route) -> None:
        reason = f"{route.reason}; after {self._choice.lost}" if self._choice.lost else route.reason
        moved, via = self._choice.path.transfer_bytes, self._choice.request.model.via
        path = self._choice.path = llm_pb2.Path(
            decode_worker=route.decode.info.worker_id, reason=reason, transfer_bytes=moved,
            migrated=self._choice.migrated, model=via.model if via else "", model_reason=via.reason if via else "",
        )  # fmt: skip
        self._choice.decode_incarnation = route.decode.info.incarnation
        self._choice.revision = route.decode.info.revision
        self._choice.fallback = WORKER_LOST if self._choice.lost else route.fallback or ""
        path.kind = llm_pb2.Path.KIND_LOCAL_PREFILL
        if route.prefill is not None:
            path.kind = llm_pb2.Path.KIND_REMOTE_PREFILL
            path.prefill_worker = route.prefill.info.worker_id

    def _note_prefilled(self, response: worker_pb2.Prefilled) -> None:
        path = self._choice.path
        path.transfer_bytes += response.transfer_bytes
        path.transport = response.transport
        path.refused_transports.update(response.refused_transports)
        self._note_fetched(response.fetched_tokens)

    def _note_fetched(self, num_tokens: int) -> None:
        if num_tokens and self._route and self._route.holder:
            self._choice.path.fetched_tokens = num_tokens
            self._choice.path.fetched_from = self._route.holder.info.worker_id

    def _note_decoded(self, span: Span) -> None:
        mailbox, is_over = self._mailbox, self._choice.finish_reason or self._choice.text.finish_reason
        span.set_attribute("decode.tokens", mailbox.next_index - self._sequence.num_prior_tokens if mailbox else 0)
        if not is_over:
            tracing.truncate(span)

    def _note_progress(self, route: Route, mailbox: Mailbox, new: Tokens) -> None:
        num_prior, choice = self._sequence.num_prior_tokens, self._choice
        if not num_prior:
            choice.num_cached_tokens = mailbox.num_cached_tokens or 0
        choice.finish_reason = mailbox.finish_reason
        choice.written += new.ids
        if mailbox.next_index - num_prior == len(new.ids) and not mailbox.finish_reason:  # its end releases all of it
            self._cluster.in_background(self._cluster.router.release_prefill(route))


def _has_ended(mailbox: Mailbox) -> bool:
    """True if the decode worker reported the end, so that it holds nothing."""
    return bool(mailbox.finish_reason) and mailbox.ended
