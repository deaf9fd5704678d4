"""The prefill service's gRPC side: protobuf in, protobuf out. The work in between is in sequences.py."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

import grpc
from grpc import aio

from services.prefill.metrics import TransferMetrics
from services.prefill.sequences import PrefillSequences, Ticket
from tandem import rpc
from tandem.process import IntegrityReport
from tandem.registry import Role
from tandem.transfer import LinkPeer, TransferError
from tandem.v1 import prefill_pb2, prefill_pb2_grpc, worker_pb2
from tandem.worker import (
    Entry,
    Event,
    Holder,
    KVLinks,
    LinkState,
    SequenceFailed,
    Streams,
    SuspectTurns,
    WorkerContext,
    WorkService,
)
from tandem.worker.serving import conversion

PROBE_BYTES = 1 << 20
PROBE_TIMEOUT_S = 2.0


class PrefillWorker(prefill_pb2_grpc.PrefillServiceServicer):
    role = Role.PREFILL

    def __init__(self, context: WorkerContext) -> None:
        self._kv = KVLinks(context, self.role, context.renew_lease)
        self._links, self.transfer_address = self._kv.keeper, self._kv.address
        self._secret, self._block_size = context.ports.secret, context.engine.layout.block_size
        self._metrics = metrics = TransferMetrics(context.metrics, context.labels(self.role))
        metrics.watch_links(self._links.report)
        self._sequences = PrefillSequences(
            context.ports.engine,
            self._links.link_to,
            self._kv.fetcher,
            payload=conversion.first_token,
            now=context.ports.links.driver.now,
            worker_id=context.worker_id,
            metrics=metrics,
        )
        # A stream's sequences are cancelled with the stream: nothing is left to end.
        self._streams = Streams(context.incarnation, lambda stream_id: None, context.starvation)
        suspects = SuspectTurns(lambda: context.engine.num_suspects)
        work = WorkService(self._streams, context.ports.new_id, self._begin, self._sequences.abort, suspects)
        probe = rpc.Servicer("tandem.v1.PrefillService", self, prefill_pb2_grpc.add_PrefillServiceServicer_to_server)
        self.servicers: Sequence[rpc.Servicer] = [work.servicer, probe]

    def tasks(self) -> list[Coroutine[Any, Any, None]]:
        return self._kv.tasks()

    def linked(self) -> tuple[str, ...]:
        return self._links.linked()

    def num_running(self) -> int:
        return len(self._sequences)

    def on_events(self, events: Sequence[Event]) -> None:
        self._sequences.on_events(events)

    def request_ids(self) -> set[str]:
        return self._sequences.request_ids()

    def check_integrity(self) -> IntegrityReport:
        return self._kv.check_integrity(self._sequences.transfer_ids(), set())

    def end_streams(self) -> None:
        self._streams.end_all()

    async def hand_over(self) -> None:
        """Does nothing: gateways notice the end of their streams."""

    async def close(self) -> None:
        self._streams.close()
        await self._kv.close()

    async def _begin(self, stream_id: str, entry: Entry) -> None:
        if not isinstance(entry, worker_pb2.Prefill):
            raise SequenceFailed("UNIMPLEMENTED", "reservations: this is a prefill worker")
        if entry.sequence.HasField("embedding"):
            embedded = await self._sequences.embed(
                conversion.request_of(entry.sequence), entry.sequence.timeout_ms / 1000
            )
            self._streams.prefilled(stream_id, worker_pb2.Prefilled(output=conversion.output_to_proto(embedded)))
            return
        if not conversion.is_signed(entry.ticket, self._secret):
            raise SequenceFailed("PERMISSION_DENIED", "ticket: no worker of this cluster has signed it")
        prompt_blocks = -(-len(entry.sequence.token_ids) // self._block_size)
        if entry.ticket.num_prompt_blocks != prompt_blocks:
            said = f"num_prompt_blocks: {entry.ticket.num_prompt_blocks}, and the prompt has {prompt_blocks}"
            raise SequenceFailed("INVALID_ARGUMENT", f"ticket.{said}")
        ticket = Ticket(
            entry.ticket.transfer_id,
            LinkPeer(entry.ticket.decode_worker, entry.ticket.decode_incarnation, entry.ticket.kv_layout_hash),
            entry.ticket.transfer_address,
            entry.ticket.num_cached_blocks,
            entry.ticket.num_prompt_blocks,
        )
        timeout_s = entry.sequence.timeout_ms / 1000
        sequence = conversion.request_of(entry.sequence)
        holder = Holder.of(entry.holder, entry.ticket.kv_layout_hash) if entry.HasField("holder") else None
        done = await self._sequences.prefill(sequence, ticket, timeout_s, holder)
        answer = worker_pb2.Prefilled(
            output=conversion.output_to_proto(done.output),
            transfer_bytes=done.transfer_bytes,
            transport=done.transport,
            refused_transports=done.refused_transports,
            fetched_tokens=done.fetched_tokens,
        )
        self._streams.prefilled(stream_id, answer)

    async def ProbeLink(
        self, request: prefill_pb2.ProbeLinkRequest, context: aio.ServicerContext[Any, Any]
    ) -> prefill_pb2.ProbeLinkResponse:
        peer = self._links.peer(request.decode_worker)
        if peer is None:
            raise rpc.Refused(grpc.StatusCode.NOT_FOUND, f"decode_worker: {request.decode_worker!r} is not registered")
        remote = LinkPeer(peer.worker_id, peer.incarnation, peer.layout_hash)
        try:
            link = await self._links.link_to(remote, peer.transfer_address)
            elapsed = await asyncio.wrap_future(link.probe(PROBE_BYTES, timeout_s=PROBE_TIMEOUT_S))
        except TransferError as error:
            raise rpc.Refused(getattr(grpc.StatusCode, error.code), str(error)) from None
        return prefill_pb2.ProbeLinkResponse(
            bytes=PROBE_BYTES, elapsed_us=int(elapsed * 1e6), transport=link.transport, refused=link.refused,
            carrier=link.carrier,
        )  # fmt: skip

    async def ListLinks(
        self, request: prefill_pb2.ListLinksRequest, context: aio.ServicerContext[Any, Any]
    ) -> prefill_pb2.ListLinksResponse:
        return prefill_pb2.ListLinksResponse(links=map(self._link_to_proto, self._links.report()))

    def _link_to_proto(self, state: LinkState) -> prefill_pb2.KVLink:
        link, moved = state.link, self._metrics.moved_to(state.peer.worker_id)
        return prefill_pb2.KVLink(
            decode_worker=state.peer.worker_id, decode_incarnation=state.peer.incarnation, healthy=link is not None,
            transport=link.transport if link else "", carrier=link.carrier if link else "", refused=state.refused,
            bytes=moved.num_bytes, transfers=moved.transfers, busy_s=moved.busy_s, failures=moved.failures,
        )  # fmt: skip
