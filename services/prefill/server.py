"""The prefill service. One request:

1 link      to the ticket's decode worker, open already or opened now
2 queue     until the engine's scheduler takes the prompt up
3 compute   in chunks; each layer of each chunk is pushed as it is computed
4 first     token sampled: the reply goes to the gateway, the commit frame to the decode worker
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any

import grpc
import structlog
from grpc import aio
from opentelemetry import trace
from opentelemetry.trace import Span

from services.prefill.links import LinkKeeper
from services.prefill.push import TracedPush
from tandem import rpc
from tandem.engine import Engine, SequenceOutput
from tandem.registry import Role
from tandem.transfer import Endpoint, Link, Sender, TransferError
from tandem.v1 import prefill_pb2, prefill_pb2_grpc, worker_pb2
from tandem.worker import WorkerContext, wire

PROBE_BYTES = 1 << 20
PROBE_TIMEOUT_S = 2.0
MIN_ARENA_BYTES, MAX_ARENA_BYTES = 1 << 20, 8 << 20
log = structlog.get_logger(__name__)
tracer = trace.get_tracer("tandem.prefill")


class PrefillWorker(prefill_pb2_grpc.PrefillServiceServicer):
    role = Role.PREFILL
    transfer_address = ""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._engine = context.ports.engine
        local = Endpoint(context.worker_id, context.incarnation, context.engine.layout.hash)
        self._sender = Sender(
            local, transports=context.settings.transports, network=context.ports.network,
            arena_bytes=_arena_bytes(context.engine),
        )  # fmt: skip
        self._links = LinkKeeper(self._sender, context.ports.registry, local.layout_hash, context.renew_lease)
        self._waiting: dict[str, asyncio.Future[SequenceOutput]] = {}
        self.servicer = rpc.Servicer(
            "tandem.v1.PrefillService", self, prefill_pb2_grpc.add_PrefillServiceServicer_to_server
        )

    def tasks(self) -> list[Coroutine[Any, Any, None]]:
        return [self._links.keep()]

    def linked(self) -> tuple[str, ...]:
        return self._links.linked()

    def num_running(self) -> int:
        return len(self._waiting)

    async def close(self) -> None:
        self._sender.close()

    def on_outputs(self, outputs: list[SequenceOutput]) -> None:
        for output in outputs:
            future = self._waiting.get(output.request_id)
            if future is not None and not future.done():
                future.set_result(output)

    async def Prefill(
        self, request: prefill_pb2.PrefillRequest, context: aio.ServicerContext[Any, Any]
    ) -> prefill_pb2.PrefillResponse:
        sequence, ticket = request.sequence, request.ticket
        with tracer.start_as_current_span("prefill") as span:
            span.set_attributes({"tandem.worker": self._context.worker_id, "prefill.tokens": len(sequence.token_ids)})
            try:
                async with asyncio.timeout(sequence.timeout_ms / 1000):
                    return await self._prefill(sequence, ticket, span)
            except TimeoutError:
                raise rpc.Refused(
                    grpc.StatusCode.DEADLINE_EXCEEDED, "the request's deadline passed in prefill"
                ) from None
            except TransferError as error:
                raise rpc.Refused(getattr(grpc.StatusCode, error.code), f"KV transfer: {error}") from None

    async def ProbeLink(
        self, request: prefill_pb2.ProbeLinkRequest, context: aio.ServicerContext[Any, Any]
    ) -> prefill_pb2.ProbeLinkResponse:
        peer = self._links.peer(request.decode_worker)
        if peer is None:
            raise rpc.Refused(grpc.StatusCode.NOT_FOUND, f"decode_worker: {request.decode_worker!r} is not registered")
        remote = Endpoint(peer.worker_id, peer.incarnation, peer.layout_hash)
        try:
            link = await self._links.link_to(remote, peer.transfer_address)
            elapsed = await asyncio.wrap_future(link.probe(PROBE_BYTES, timeout_s=PROBE_TIMEOUT_S))
        except TransferError as error:
            raise rpc.Refused(getattr(grpc.StatusCode, error.code), str(error)) from None
        return prefill_pb2.ProbeLinkResponse(bytes=PROBE_BYTES, elapsed_us=int(elapsed * 1e6), transport=link.transport)

    async def _prefill(
        self, sequence: worker_pb2.SequenceSpec, ticket: worker_pb2.LandingTicket, span: Span
    ) -> prefill_pb2.PrefillResponse:
        started = time.monotonic()
        remote = Endpoint(ticket.decode_worker, ticket.decode_incarnation, ticket.kv_layout_hash)
        link = await self._links.link_to(remote, ticket.transfer_address)
        push = self._begin(link, sequence, ticket, span)
        try:
            output = await self._compute(sequence, ticket, push)
        except BaseException as error:
            push.abort(f"prefill ended: {type(error).__name__}")
            raise
        first = wire.output_to_proto(output)
        push.commit(first.SerializeToString())
        computing = push.first_push_at or time.monotonic()
        span.set_attributes({"prefill.cached_tokens": output.num_cached_tokens, "prefill.queue_s": computing - started})
        return prefill_pb2.PrefillResponse(
            output=first,
            transfer_bytes=push.bytes_sent,
            transport=link.transport,
            queue_ms=int((computing - started) * 1000),
            compute_ms=int((time.monotonic() - computing) * 1000),
        )

    def _begin(
        self, link: Link, sequence: worker_pb2.SequenceSpec, ticket: worker_pb2.LandingTicket, span: Span
    ) -> TracedPush:
        push = link.begin(
            ticket.transfer_id,
            first_block=ticket.num_cached_blocks,
            num_blocks=ticket.num_prompt_blocks - ticket.num_cached_blocks,
            num_layers=self._context.engine.layout.num_layers,
            timeout_s=sequence.timeout_ms / 1000,
        )
        return TracedPush(push, link, span, self._engine.rates.moved)

    async def _compute(
        self, sequence: worker_pb2.SequenceSpec, ticket: worker_pb2.LandingTicket, push: TracedPush
    ) -> SequenceOutput:
        """Run the prompt through the engine; whatever ends this call early also frees the sequence."""
        request_id = sequence.request_id
        request = wire.request_of(sequence)
        future: asyncio.Future[SequenceOutput] = asyncio.get_running_loop().create_future()
        if request_id in self._waiting:
            raise rpc.Refused(grpc.StatusCode.ALREADY_EXISTS, f"request_id: {request_id!r} is being prefilled")
        self._waiting[request_id] = future
        try:
            await self._engine.call(
                lambda engine: engine.add(request, sink=push, first_block=ticket.num_cached_blocks, prefill_only=True)
            )
            output = await future
        except ValueError as error:
            raise rpc.Refused(grpc.StatusCode.INVALID_ARGUMENT, str(error)) from None
        except BaseException:
            self._engine.submit(lambda engine: engine.abort(request_id))
            raise
        finally:
            del self._waiting[request_id]
        if push.failure is not None:
            raise push.failure
        if output.error:
            raise rpc.Refused(grpc.StatusCode.INTERNAL, output.error)
        return output


def _arena_bytes(engine: Engine) -> int:
    """What a link may hold on its way: never more than the cache that it comes from."""
    cache = sum(layer.nbytes for layer in engine.kv_cache)
    return min(max(cache, MIN_ARENA_BYTES), MAX_ARENA_BYTES)
