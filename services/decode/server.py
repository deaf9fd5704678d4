"""The decode service. One sequence:

1 reserve   waits its turn for blocks; a landing is expected by the KV receiver; the ticket goes to the gateway
2 landing   frames arrive, verified, into blocks that nobody reads yet
3 join      the commit frame brings the first token; the sequence enters the running batch
4 decode    tokens leave in the gateway's one stream, those of a few steps together where many sequences run
5 ended     by a finish, an abort, a failed transfer, the deadline, or the loss of its gateway: all is freed
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass
from typing import Any

import grpc
import structlog
from grpc import aio
from opentelemetry import trace
from opentelemetry.trace import Span, Status, StatusCode

from services.decode.admission import Admission
from services.decode.streams import Streams
from tandem import rpc
from tandem.engine import FinishReason, SequenceOutput
from tandem.registry import Role
from tandem.transfer import Endpoint, Receiver
from tandem.v1 import decode_pb2, decode_pb2_grpc, worker_pb2
from tandem.worker import WorkerContext, wire

RECEIVER_WATCH_S = 0.5
log = structlog.get_logger(__name__)
tracer = trace.get_tracer("tandem.decode")


@dataclass(slots=True)
class Live:
    """A sequence this worker holds something for."""

    gateway_id: str
    transfer_id: str
    deadline: asyncio.TimerHandle
    span: Span
    num_tokens: int = 0


class DecodeWorker(decode_pb2_grpc.DecodeServiceServicer):
    role = Role.DECODE

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._engine = context.ports.engine
        self._endpoint = Endpoint(context.worker_id, context.incarnation, context.engine.layout.hash)
        settings = context.settings
        self._receiver = Receiver(
            self._endpoint, context.engine.kv_cache, host=settings.host, port=settings.transfer_port,
            transports=settings.transports, network=context.ports.network,
        )  # fmt: skip
        port = self._receiver.address.rpartition(":")[2]
        self.transfer_address = rpc.address(settings.reachable_host(context.ports.hostname), int(port))
        self._admission = Admission(self._engine)
        self._streams = Streams(context.incarnation, self._lost)
        self._live: dict[str, Live] = {}
        self._loop = asyncio.get_running_loop()
        self.servicer = rpc.Servicer(
            "tandem.v1.DecodeService", self, decode_pb2_grpc.add_DecodeServiceServicer_to_server
        )

    def tasks(self) -> list[Coroutine[Any, Any, None]]:
        return [self._watch_receiver()]

    def linked(self) -> tuple[str, ...]:
        return ()

    def num_running(self) -> int:
        return len(self._live) + len(self._admission)

    def close(self) -> None:
        self._streams.close()
        self._receiver.close()

    async def _watch_receiver(self) -> None:
        """A decode worker that KV can no longer reach is of no use: it ends, and is started again."""
        while self._receiver.healthy:
            await asyncio.sleep(RECEIVER_WATCH_S)
        raise RuntimeError("the KV receiver's thread ended")

    # --- the service ---

    async def Reserve(
        self, request: decode_pb2.ReserveRequest, context: aio.ServicerContext[Any, Any]
    ) -> decode_pb2.ReserveResponse:
        self._check(request)
        sequence = request.sequence
        try:
            async with asyncio.timeout(sequence.timeout_ms / 1000):
                ticket = await (self._add if request.local_prefill else self._reserve)(request)
        except TimeoutError:
            raise rpc.Refused(
                grpc.StatusCode.DEADLINE_EXCEEDED, "the request's deadline passed while waiting for KV blocks"
            ) from None
        except ValueError as error:
            raise rpc.Refused(grpc.StatusCode.INVALID_ARGUMENT, str(error)) from None
        return decode_pb2.ReserveResponse(ticket=ticket)

    async def StreamTokens(
        self, request: decode_pb2.StreamTokensRequest, context: aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[decode_pb2.StreamTokensResponse]:
        async for response in self._streams.stream(request.gateway_id):
            yield response

    async def Abort(
        self, request: decode_pb2.AbortRequest, context: aio.ServicerContext[Any, Any]
    ) -> decode_pb2.AbortResponse:
        await asyncio.gather(*(self._abort(request_id) for request_id in request.request_ids))
        return decode_pb2.AbortResponse()

    # --- a sequence's way in ---

    def _check(self, request: decode_pb2.ReserveRequest) -> None:
        if request.decode_incarnation != self._context.incarnation:
            raise rpc.Refused(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"decode_incarnation: this worker is {self._context.incarnation}, not {request.decode_incarnation}",
            )
        if not self._streams.connected(request.gateway_id):
            raise rpc.Refused(grpc.StatusCode.FAILED_PRECONDITION, "gateway_id: open StreamTokens before reserving")
        if request.sequence.request_id in self._live:
            raise rpc.Refused(
                grpc.StatusCode.ALREADY_EXISTS, f"request_id: {request.sequence.request_id!r} is running here"
            )

    async def _add(self, request: decode_pb2.ReserveRequest) -> None:
        """The prompt is read here."""
        sequence = wire.request_of(request.sequence)
        self._enter(request, transfer_id="")
        try:
            await self._engine.call(lambda engine: engine.add(sequence))
        except BaseException:
            await self._abort(sequence.request_id)
            raise

    async def _reserve(self, request: decode_pb2.ReserveRequest) -> worker_pb2.LandingTicket:
        """Blocks for the prompt and all that may follow, and a landing that expects the prompt's KV."""
        sequence = wire.request_of(request.sequence)
        num_cached, block_ids = await self._admission.reserve(sequence)
        transfer_id = self._context.ports.new_id()
        self._enter(request, transfer_id)
        self._live[sequence.request_id].span.set_attribute("decode.cached_tokens", num_cached)
        try:
            self._expect(request, transfer_id, num_cached, block_ids)
        except BaseException:
            await self._abort(sequence.request_id)
            raise
        return worker_pb2.LandingTicket(
            transfer_id=transfer_id,
            decode_worker=self._context.worker_id,
            decode_incarnation=self._context.incarnation,
            transfer_address=self.transfer_address,
            kv_layout_hash=self._endpoint.layout_hash,
            num_cached_blocks=num_cached // self._context.settings.block_size,
            num_prompt_blocks=len(block_ids),
        )

    def _expect(
        self, request: decode_pb2.ReserveRequest, transfer_id: str, num_cached: int, block_ids: list[int]
    ) -> None:
        request_id = request.sequence.request_id

        def joined(payload: bytes, num_bytes: int) -> None:
            token = wire.token_of(worker_pb2.SequenceOutput.FromString(payload))
            self._engine.submit(lambda engine: engine.join(request_id, token))
            self._loop.call_soon_threadsafe(self._landed, request_id, num_bytes)

        def failed(code: str, reason: str) -> None:
            self._loop.call_soon_threadsafe(self._fail, request_id, code, f"KV transfer: {reason}")

        self._receiver.expect(
            transfer_id,
            block_ids=block_ids,
            first_block=num_cached // self._context.settings.block_size,
            timeout_s=request.sequence.timeout_ms / 1000,
            on_commit=joined,
            on_abort=failed,
            sender=request.prefill_incarnation,
        )

    def _enter(self, request: decode_pb2.ReserveRequest, transfer_id: str) -> None:
        request_id, timeout_s = request.sequence.request_id, request.sequence.timeout_ms / 1000
        late = "the request's deadline passed in decode"
        span = tracer.start_span("decode")
        span.set_attribute("tandem.worker", self._context.worker_id)
        timer = self._loop.call_later(timeout_s, self._fail, request_id, "DEADLINE_EXCEEDED", late)
        self._live[request_id] = Live(request.gateway_id, transfer_id, timer, span)

    def _landed(self, request_id: str, num_bytes: int) -> None:
        live = self._live.get(request_id)
        if live is not None:
            live.span.add_event("landed", {"kv.transfer.bytes": num_bytes})

    # --- its tokens, and its end ---

    def on_outputs(self, outputs: list[SequenceOutput]) -> None:
        for output in outputs:
            live = self._live.get(output.request_id)
            if live is None:
                continue
            live.num_tokens += len(output.tokens)
            self._streams.send(live.gateway_id, output)
            if output.finished:
                self._leave(output.request_id, output.finish_reason, output.error or "")
        self._admission.room()

    def _fail(self, request_id: str, code: str, message: str) -> None:
        """End a sequence with an error that its gateway is told of."""
        live = self._live.get(request_id)
        if live is None:
            return
        self._streams.fail(live.gateway_id, request_id, code, message)
        self._free(request_id, live)
        self._leave(request_id, None, message)

    async def _abort(self, request_id: str) -> None:
        live = self._live.get(request_id)
        if live is None:
            return
        freed = self._free(request_id, live)
        self._leave(request_id, FinishReason.ABORT, "")
        await freed

    def _free(self, request_id: str, live: Live) -> asyncio.Future[bool]:
        """Fence the transfer, then give the blocks back: in this order, or a late frame could land in another's."""

        def free() -> bool:
            if live.transfer_id:
                self._receiver.cancel(live.transfer_id).result(5.0)
            return self._engine.submit(lambda engine: engine.abort(request_id)).result(5.0)

        freed = self._loop.run_in_executor(None, free)
        freed.add_done_callback(lambda done: self._admission.room())
        return freed

    def _leave(self, request_id: str, reason: FinishReason | None, error: str) -> None:
        live = self._live.pop(request_id)
        live.deadline.cancel()
        live.span.set_attribute("decode.tokens", live.num_tokens)
        if reason is not None:
            live.span.set_attribute("decode.finish_reason", reason.value)
        if error:
            live.span.set_status(Status(StatusCode.ERROR, error))
        live.span.end()

    def _lost(self, gateway_id: str) -> None:
        lost = [request_id for request_id, live in self._live.items() if live.gateway_id == gateway_id]
        if lost:
            log.warning("gateway lost", gateway_id=gateway_id, aborted=len(lost))
        for request_id in lost:
            self._fail(request_id, "UNAVAILABLE", "the gateway's stream broke")
