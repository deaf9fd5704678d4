"""The decode service's gRPC side: protobuf in, protobuf out. The work in between is in sequences.py."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

from services.decode.sequences import DecodeSequences, Reservation
from tandem import rpc
from tandem.engine import SampledToken
from tandem.process import IntegrityReport
from tandem.registry import Role
from tandem.v1 import worker_pb2
from tandem.worker import (
    Entry,
    Event,
    Holder,
    KVLinks,
    SequenceFailed,
    Streams,
    SuspectTurns,
    WorkerContext,
    WorkService,
)
from tandem.worker.serving import conversion

RECEIVER_CHECK_S = 0.5


class DecodeWorker:
    role = Role.DECODE

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._kv = KVLinks(context, self.role, lambda: None)
        self.transfer_address = self._kv.address
        self._streams = Streams(
            context.incarnation, lambda stream_id: self._sequences.stream_ended(stream_id), context.starvation
        )
        self._sequences = DecodeSequences(
            context.ports.engine,
            self._kv.receiver,
            self._streams,
            reserved=self._reserved,
            first_token=_first_token,
            new_id=context.ports.new_id,
            worker_id=context.worker_id,
        )
        suspects = SuspectTurns(lambda: context.engine.num_suspects + self._sequences.num_entering_suspects())
        work = WorkService(self._streams, context.ports.new_id, self._begin, self._sequences.abort, suspects)
        self.servicers: Sequence[rpc.Servicer] = [work.servicer]

    def tasks(self) -> list[Coroutine[Any, Any, None]]:
        return [self._watch(), *self._kv.tasks()]

    def linked(self) -> tuple[str, ...]:
        return ()

    def num_running(self) -> int:
        return len(self._sequences)

    def on_events(self, events: Sequence[Event]) -> None:
        self._sequences.on_events(events)

    def request_ids(self) -> set[str]:
        return self._sequences.request_ids()

    def check_integrity(self) -> IntegrityReport:
        return self._kv.check_integrity(set(), self._sequences.transfer_ids())

    def end_streams(self) -> None:
        self._streams.end_all()

    async def hand_over(self) -> None:
        await self._sequences.hand_over()

    async def close(self) -> None:
        await self._sequences.close()
        self._streams.close()
        await self._kv.close()

    async def _watch(self) -> None:
        """Ends the worker, which is then started again, when a transfer cannot be fenced."""
        raise RuntimeError(await asyncio.shield(self._sequences.stuck))

    async def _begin(self, stream_id: str, entry: Entry) -> None:
        if not isinstance(entry, worker_pb2.Reservation):
            raise SequenceFailed("UNIMPLEMENTED", "prefills: this is a decode worker")
        sequence, timeout_s = conversion.request_of(entry.sequence), entry.sequence.timeout_ms / 1000
        await self._context.ports.engine.prepare(sequence, timeout_s)
        if entry.local_prefill:
            layout_hash = self._kv.peer.layout_hash
            holder = Holder.of(entry.holder, layout_hash) if entry.HasField("holder") else None
            fetched = await self._kv.fetcher.complete(sequence, holder, timeout_s)
            self._sequences.add(sequence, stream_id, timeout_s, fetched)
        else:
            self._sequences.reserve(sequence, stream_id, timeout_s, entry.prefill_incarnation)

    def _reserved(self, stream_id: str, request_id: str, reservation: Reservation | None, fetched_tokens: int) -> None:
        ticket = self._ticket(reservation) if reservation else None
        answer = worker_pb2.Reserved(request_id=request_id, ticket=ticket, fetched_tokens=fetched_tokens)
        self._streams.reserved(stream_id, answer)

    def _ticket(self, reservation: Reservation) -> worker_pb2.LandingTicket:
        ticket = worker_pb2.LandingTicket(
            transfer_id=reservation.transfer_id,
            decode_worker=self._context.worker_id,
            decode_incarnation=self._context.incarnation,
            transfer_address=self.transfer_address,
            kv_layout_hash=self._kv.peer.layout_hash,
            num_cached_blocks=reservation.num_cached_tokens // self._context.settings.block_size,
            num_prompt_blocks=reservation.num_prompt_blocks,
        )
        conversion.sign(ticket, self._context.ports.secret)
        return ticket


def _first_token(payload: bytes) -> SampledToken:
    return conversion.token_of(worker_pb2.SequenceOutput.FromString(payload))
