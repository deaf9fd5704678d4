"""The decode service: protobuf in, protobuf out. What happens in between is in sequences.py."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import grpc
from grpc import aio

from services.decode.sequences import Sequences
from services.decode.streams import Streams
from tandem import rpc
from tandem.engine import SampledToken, SequenceOutput
from tandem.integrity import IntegrityReport
from tandem.registry import Role
from tandem.transfer import Endpoint, Receiver
from tandem.v1 import decode_pb2, decode_pb2_grpc, worker_pb2
from tandem.worker import SequenceFailed, WorkerContext, wire

RECEIVER_CHECK_S = 0.5


class DecodeWorker(decode_pb2_grpc.DecodeServiceServicer):
    role = Role.DECODE

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        settings, engine = context.settings, context.engine
        self._endpoint = Endpoint(context.worker_id, context.incarnation, engine.layout.hash)
        self._receiver = Receiver(
            self._endpoint, engine.kv_cache, host=settings.host, port=settings.transfer_port,
            transports=settings.transports, network=context.ports.network, driver=context.ports.driver,
            nonce=context.ports.new_nonce, secret=context.ports.secret,
        )  # fmt: skip
        port = self._receiver.address.rpartition(":")[2]
        self.transfer_address = rpc.address(settings.reachable_host(context.ports.hostname), int(port))
        self._streams = Streams(context.incarnation, lambda stream_id: self._sequences.stream_ended(stream_id))
        self._sequences = Sequences(
            context.ports.engine,
            self._receiver,
            self._streams,
            first_token=_first_token,
            new_id=context.ports.new_id,
            worker_id=context.worker_id,
        )
        self.servicer = rpc.Servicer(
            "tandem.v1.DecodeService", self, decode_pb2_grpc.add_DecodeServiceServicer_to_server
        )

    def tasks(self) -> list[Coroutine[Any, Any, None]]:
        return [self._watch_receiver()]

    def linked(self) -> tuple[str, ...]:
        return ()

    def num_running(self) -> int:
        return len(self._sequences)

    def on_outputs(self, outputs: list[SequenceOutput]) -> None:
        self._sequences.on_outputs(outputs)

    def request_ids(self) -> set[str]:
        return self._sequences.request_ids()

    def check_integrity(self) -> IntegrityReport:
        return self._receiver.check_integrity(self._sequences.transfer_ids())

    async def hand_over(self) -> None:
        await self._sequences.hand_over()

    async def close(self) -> None:
        await self._sequences.close()
        self._streams.close()
        self._receiver.close()

    async def _watch_receiver(self) -> None:
        """A decode worker that KV can no longer reach is of no use: it ends, and is started again."""
        while self._receiver.healthy and not self._sequences.stuck.done():
            await asyncio.sleep(RECEIVER_CHECK_S)
        raise RuntimeError(self._sequences.stuck.result() if self._receiver.healthy else "the KV receiver ended")

    async def Reserve(
        self, request: decode_pb2.ReserveRequest, context: aio.ServicerContext[Any, Any]
    ) -> decode_pb2.ReserveResponse:
        incarnation = self._context.incarnation
        if request.decode_incarnation != incarnation:
            raise rpc.Refused(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"decode_incarnation: this worker is {incarnation}, not {request.decode_incarnation}",
            )
        try:
            return decode_pb2.ReserveResponse(ticket=await self._reserve(request))
        except SequenceFailed as error:
            raise rpc.Refused(getattr(grpc.StatusCode, error.code), str(error)) from None

    async def StreamTokens(
        self, request: decode_pb2.StreamTokensRequest, context: aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[decode_pb2.StreamTokensResponse]:
        async for response in self._streams.stream(request.stream_id):
            yield response

    async def Abort(
        self, request: decode_pb2.AbortRequest, context: aio.ServicerContext[Any, Any]
    ) -> decode_pb2.AbortResponse:
        held = self._sequences.request_ids().intersection(request.request_ids)
        await asyncio.gather(*(self._sequences.abort(request_id) for request_id in held))
        return decode_pb2.AbortResponse()

    async def _reserve(self, request: decode_pb2.ReserveRequest) -> worker_pb2.LandingTicket | None:
        sequence, timeout_s = wire.request_of(request.sequence), request.sequence.timeout_ms / 1000
        await self._context.ports.engine.prepare(sequence, timeout_s)
        if request.local_prefill:
            await self._sequences.add(sequence, request.stream_id, timeout_s)
            return None
        reserved = await self._sequences.reserve(sequence, request.stream_id, timeout_s, request.prefill_incarnation)
        ticket = worker_pb2.LandingTicket(
            transfer_id=reserved.transfer_id,
            decode_worker=self._context.worker_id,
            decode_incarnation=self._context.incarnation,
            transfer_address=self.transfer_address,
            kv_layout_hash=self._endpoint.layout_hash,
            num_cached_blocks=reserved.num_cached_tokens // self._context.settings.block_size,
            num_prompt_blocks=reserved.num_prompt_blocks,
        )
        wire.sign(ticket, self._context.ports.secret)
        return ticket


def _first_token(payload: bytes) -> SampledToken:
    return wire.token_of(worker_pb2.SequenceOutput.FromString(payload))
