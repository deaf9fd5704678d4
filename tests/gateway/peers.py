"""A prefill and a decode worker for the gateway to talk to: the real protocol over real gRPC and the real registry,
with a text generator where the engine would be."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any
from uuid import uuid4

import grpc

from services.gateway import GatewaySettings
from tandem import rpc
from tandem.local import RedisServer
from tandem.process import RunningSettings
from tandem.registry import Registry, Role, WorkerInfo, WorkerLoad
from tandem.security import OPEN, Security
from tandem.settings import Settings
from tandem.v1 import (
    llm_pb2,
    prefill_pb2,
    prefill_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)
from tandem.worker import FOLLOWED
from tandem.worker.serving.model_files import ModelFilesService
from tests.gateway.tiny_model import write_model

MODEL = "tiny"
CONTEXT = 512
REVISION = "revision-1"
TTL_S, HEARTBEAT_S = 30.0, 0.5
Reply = Callable[[worker_pb2.SequenceSpec], list[int]]


@cache
def folder_of(context: int) -> Path:
    """A model's folder, without weights."""
    return write_model(Path(mkdtemp(prefix="tandem-test-")), context)


@dataclass(slots=True)
class HeldSequence:
    """A sequence that a decode worker holds."""

    spec: worker_pb2.SequenceSpec
    stream_id: str
    task: asyncio.Task[None] | None = None


class Generator:
    """A deterministic answer: `reply` gives its tokens, then end-of-text, cut at max_tokens."""

    def __init__(self, reply: Reply) -> None:
        self.reply = reply
        self.num_proposed_tokens = self.num_accepted_tokens = 0
        self.logprob: Callable[[worker_pb2.SequenceSpec], float] = lambda spec: -0.5

    def output(self, spec: worker_pb2.SequenceSpec, index: int) -> worker_pb2.SequenceOutput:
        tokens = [*self.reply(spec), 0]
        token = tokens[index]
        output = worker_pb2.SequenceOutput(
            request_id=spec.request_id, first_index=index, token_ids=[token],
            num_proposed_tokens=self.num_proposed_tokens, num_accepted_tokens=self.num_accepted_tokens,
            batch_size=2, kv_usage=0.25,
        )  # fmt: skip
        if spec.sampling.HasField("logprobs"):
            logprob = self.logprob(spec)
            top = [llm_pb2.TopLogprob(token_id=token + i, logprob=logprob - i) for i in range(spec.sampling.logprobs)]
            output.logprobs.append(llm_pb2.TokenLogprobs(token_id=token, logprob=logprob, top=top))
        if spec.sampling.HasField("prompt_logprobs") and index == 0:
            output.MergeFromString(_prompt_logprobs(spec.token_ids[1:], spec.sampling.prompt_logprobs))
        if token in spec.sampling.stop_token_ids:
            output.finish_reason = llm_pb2.FINISH_REASON_STOP
        elif index + 1 == spec.sampling.max_tokens or index + 1 == len(tokens):
            output.finish_reason = llm_pb2.FINISH_REASON_LENGTH
        return output


def _prompt_logprobs(token_ids: list[int], num_top: int) -> bytes:
    """The field of an output that says them: encoded once for each token id, for prompts may be very long."""
    top = [llm_pb2.TopLogprob(token_id=1, logprob=-0.125)][:num_top]
    encoded = {}
    for token_id in set(token_ids):
        one = llm_pb2.TokenLogprobs(token_id=token_id, logprob=-0.25 * token_id, rank=3, top=top)
        encoded[token_id] = worker_pb2.SequenceOutput(prompt_logprobs=[one]).SerializeToString()
    return b"".join(map(encoded.__getitem__, token_ids))


class WorkingPeer(worker_pb2_grpc.WorkerServiceServicer):
    """A worker's side of the gateway's stream."""

    def __init__(self, incarnation: str, layout_hash: str, generator: Generator) -> None:
        self.incarnation = incarnation
        self.layout_hash = layout_hash
        self.generator = generator
        self.seen: list[worker_pb2.SequenceSpec] = []
        self.refuse: grpc.StatusCode | None = None
        self.refusal = "refused for the test"
        self.num_sent = self.num_passed_on = 0
        self.silent = False  # on its stream, from its beginning
        self._streams: dict[str, asyncio.Queue[worker_pb2.WorkResponse | None]] = {}
        # Status of streams that it ends, as a worker does whose gateway is silent.
        self.last_status: grpc.StatusCode | None = None

    async def Work(
        self, requests: AsyncIterator[worker_pb2.WorkRequest], context: Any
    ) -> AsyncIterator[worker_pb2.WorkResponse]:
        stream_id = uuid4().hex
        queue = self._streams[stream_id] = asyncio.Queue()
        reading = asyncio.create_task(self._read(stream_id, requests))
        try:
            if self.silent:
                await asyncio.Event().wait()
            yield worker_pb2.WorkResponse(incarnation=self.incarnation)
            while (message := await queue.get()) is not None:
                yield message
            if self.last_status:
                await context.abort(self.last_status, "the call was ended")
        finally:
            reading.cancel()
            self.ended()

    async def _read(self, stream_id: str, requests: AsyncIterator[worker_pb2.WorkRequest]) -> None:
        async for request in requests:
            self.num_passed_on = max(self.num_passed_on, request.num_passed_on)
            for reservation in request.reservations:
                self.reserve(stream_id, reservation)
            for prefill in request.prefills:
                self.prefill(stream_id, prefill)
            for request_id in request.aborts:
                self.abort(request_id)
                self._say(stream_id, worker_pb2.WorkResponse(released=[request_id]))

    def reserve(self, stream_id: str, request: worker_pb2.Reservation) -> None:
        raise AssertionError("a reservation came to a prefill worker")

    def prefill(self, stream_id: str, request: worker_pb2.Prefill) -> None:
        raise AssertionError("a prefill came to a decode worker")

    def abort(self, request_id: str) -> None:
        raise AssertionError("an abort came that was not expected")

    def ping(self, starvation: float) -> None:
        for stream_id in self._streams:
            self._say(stream_id, worker_pb2.WorkResponse(pulse=worker_pb2.Pulse(starvation=starvation)))

    def ended(self) -> None:
        """A stream has ended."""

    def _say(self, stream_id: str, message: worker_pb2.WorkResponse) -> None:
        self._streams[stream_id].put_nowait(message)

    def _refuse(self, stream_id: str, request_id: str, refusal: grpc.StatusCode) -> None:
        failure = worker_pb2.Failure(code=refusal.name, message=self.refusal)
        output = worker_pb2.SequenceOutput(request_id=request_id, failure=failure)
        self._say(stream_id, worker_pb2.WorkResponse(outputs=[output]))


class DecodePeer(WorkingPeer):
    def __init__(self, incarnation: str, layout_hash: str, generator: Generator) -> None:
        super().__init__(incarnation, layout_hash, generator)
        self.step_s = 0.001
        self.held: dict[str, HeldSequence] = {}
        self.senders: list[str] = []
        self.aborted: list[str] = []
        self.skip_token = -1
        self.repeat_tokens = False

    def reserve(self, stream_id: str, request: worker_pb2.Reservation) -> None:
        spec = request.sequence
        if self.refuse is not None:
            self._refuse(stream_id, spec.request_id, self.refuse)
            return
        self.seen.append(spec)
        self.senders.append(request.prefill_incarnation)
        self.held[spec.request_id] = sequence = HeldSequence(spec, stream_id)
        reserved = worker_pb2.Reserved(request_id=spec.request_id)
        if request.local_prefill:
            sequence.task = asyncio.create_task(self._decode(sequence, spec.num_prior_tokens))
        else:
            ticket = worker_pb2.LandingTicket(
                transfer_id=spec.request_id, decode_worker="d", decode_incarnation=self.incarnation,
                kv_layout_hash=self.layout_hash,
            )  # fmt: skip
            reserved.ticket.CopyFrom(ticket)
        self._say(stream_id, worker_pb2.WorkResponse(reserved=[reserved]))

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)
        self._free(request_id)

    def join(self, request_id: str) -> None:
        """The commit frame has landed."""
        sequence = self.held.get(request_id)
        if sequence is not None:
            sequence.task = asyncio.create_task(self._decode(sequence, sequence.spec.num_prior_tokens + 1))

    def fail(self, code: str) -> None:
        """Fail everything that runs."""
        for request_id, sequence in list(self.held.items()):
            failure = worker_pb2.Failure(code=code, message="failed for the test")
            self._send(sequence, worker_pb2.SequenceOutput(request_id=request_id, failure=failure))
            self._free(request_id)

    def break_streams(self) -> None:
        """End every stream and what depends on it, as a worker does whose gateway has gone."""
        for queue in self._streams.values():
            queue.put_nowait(None)
        for request_id in list(self.held):
            self._free(request_id)

    async def _decode(self, sequence: HeldSequence, index: int) -> None:
        spec = sequence.spec
        try:
            joined = index > spec.num_prior_tokens
            if joined and (ended := self.generator.output(spec, index - 1).finish_reason):
                self._send(
                    sequence,
                    worker_pb2.SequenceOutput(request_id=spec.request_id, first_index=index, finish_reason=ended),
                )
                return
            while True:
                await asyncio.sleep(self.step_s)
                output = self.generator.output(spec, index)
                if self.repeat_tokens and index > 1:
                    before = self.generator.output(spec, index - 1)
                    before.token_ids.extend(output.token_ids)
                    before.finish_reason = output.finish_reason
                    output = before
                if index != self.skip_token:
                    self._send(sequence, output)
                if output.finish_reason:
                    return
                index += 1
        finally:
            self.held.pop(spec.request_id, None)

    def _send(self, sequence: HeldSequence, output: worker_pb2.SequenceOutput) -> None:
        self.num_sent += 1
        self._say(sequence.stream_id, worker_pb2.WorkResponse(outputs=[output], num_sent=self.num_sent))

    def _free(self, request_id: str) -> None:
        sequence = self.held.pop(request_id, None)
        if sequence is not None and sequence.task is not None:
            sequence.task.cancel()


def embedding_of(token_ids: Sequence[int]) -> list[float]:
    """No model's, but of all tokens in their order."""
    return [
        sum((i + 1) * token for i, token in enumerate(token_ids)) / 8,
        float(len(token_ids)),
        -0.5,
        token_ids[-1] / 4,
    ]


class PrefillPeer(WorkingPeer, prefill_pb2_grpc.PrefillServiceServicer):
    def __init__(
        self, incarnation: str, layout_hash: str, generator: Generator, decodes: Callable[[str], DecodePeer]
    ) -> None:
        super().__init__(incarnation, layout_hash, generator)
        self.running: dict[str, asyncio.Task[None]] = {}
        self.cancelled: list[str] = []
        self.hold = asyncio.Event()
        self.hold.set()
        self._decodes = decodes

    async def ProbeLink(self, request: prefill_pb2.ProbeLinkRequest, context: Any) -> prefill_pb2.ProbeLinkResponse:
        return prefill_pb2.ProbeLinkResponse(bytes=1, elapsed_us=1, transport="tcp")

    async def ListLinks(self, request: prefill_pb2.ListLinksRequest, context: Any) -> prefill_pb2.ListLinksResponse:
        link = prefill_pb2.KVLink(decode_worker="d", healthy=True, transport="tcp", bytes=4000, busy_s=2.0)
        return prefill_pb2.ListLinksResponse(links=[link])

    def prefill(self, stream_id: str, request: worker_pb2.Prefill) -> None:
        if not request.sequence.HasField("embedding"):
            assert request.ticket.kv_layout_hash == self.layout_hash, "pushing to a worker of another KV layout"
        self.seen.append(request.sequence)
        self.running[request.sequence.request_id] = asyncio.create_task(self._prefill(stream_id, request))

    def abort(self, request_id: str) -> None:
        """Forgets it here: a task that is cancelled before it began runs no line of its own."""
        if (task := self.running.pop(request_id, None)) is not None:
            self.cancelled.append(request_id)
            task.cancel()

    def ended(self) -> None:
        for request_id in list(self.running):
            self.abort(request_id)

    async def _prefill(self, stream_id: str, request: worker_pb2.Prefill) -> None:
        spec = request.sequence
        await self.hold.wait()
        del self.running[spec.request_id]
        if self.refuse is not None:
            self._refuse(stream_id, spec.request_id, self.refuse)
            return
        if spec.HasField("embedding"):
            vector = embedding_of(spec.token_ids)[: spec.embedding.dimensions or None]
            embedded = worker_pb2.SequenceOutput(request_id=spec.request_id, token_ids=[5], embedding=vector)
            self._say(stream_id, worker_pb2.WorkResponse(prefilled=[worker_pb2.Prefilled(output=embedded)]))
            return
        output = self.generator.output(spec, spec.num_prior_tokens)
        output.num_cached_tokens = 3
        self._decodes(request.ticket.decode_incarnation).join(spec.request_id)
        answer = worker_pb2.Prefilled(
            output=output, transfer_bytes=4096, transport="tcp", refused_transports={"shm": "another host"}
        )
        self._say(stream_id, worker_pb2.WorkResponse(prefilled=[answer]))


@dataclass(slots=True)
class Peer:
    """A registered worker."""

    info: WorkerInfo
    server: rpc.Server
    servicer: Any
    heartbeat: asyncio.Task[None]
    files: ModelFilesService

    async def die(self) -> None:
        """As kill -9 would: connections break, the lease stays until it runs out."""
        self.heartbeat.cancel()
        await self.server.stop(0)


class PeerSettings(Settings):
    """Settings of a peer that may change while it runs."""

    log_level: str = "info"


@dataclass
class Peers:
    """A cluster of peers. Times out nothing and hides nothing: what the gateway sent is in `seen`."""

    registry: Registry
    generator: Generator
    workers: dict[str, Peer] = field(default_factory=dict)
    security: Security = OPEN  # of workers that are added
    max_model_len: int = 256  # likewise
    folder: Path = field(default_factory=lambda: folder_of(CONTEXT))  # of their model, likewise
    model: str = MODEL  # likewise
    linked: bool = True  # KV has moved between them
    silent: bool = False  # decode workers that are added never open a stream
    _decodes: dict[str, DecodePeer] = field(default_factory=dict)

    @property
    def decode(self) -> DecodePeer:
        servicer: DecodePeer = self.workers["d"].servicer
        return servicer

    @property
    def prefill(self) -> PrefillPeer:
        servicer: PrefillPeer = self.workers["p"].servicer
        return servicer

    async def add_decode(
        self, worker_id: str = "d", revision: str = REVISION, num_blocks: int = 64, port: int = 0
    ) -> Peer:
        incarnation = uuid4().hex
        peer = self._decodes[incarnation] = DecodePeer(incarnation, layout_of(revision), self.generator)
        peer.silent = self.silent
        return await self._add(worker_id, Role.DECODE, incarnation, revision, peer, [], num_blocks, port)

    async def add_prefill(self, worker_id: str = "p", revision: str = REVISION) -> Peer:
        incarnation = uuid4().hex
        peer = PrefillPeer(incarnation, layout_of(revision), self.generator, self._by_incarnation)
        probe = rpc.Servicer("tandem.v1.PrefillService", peer, prefill_pb2_grpc.add_PrefillServiceServicer_to_server)
        return await self._add(worker_id, Role.PREFILL, incarnation, revision, peer, [probe])

    async def cut(self, worker_id: str) -> None:
        """Its connections end; it listens again at once, as the same incarnation."""
        peer = self.workers[worker_id]
        await peer.server.stop(0)
        peer.server = await self._serve(peer.servicer, peer.files, [], peer.server.port)

    async def _serve(
        self, peer: WorkingPeer, files: ModelFilesService, others: list[rpc.Servicer], port: int
    ) -> rpc.Server:
        work = rpc.Servicer("tandem.v1.WorkerService", peer, worker_pb2_grpc.add_WorkerServiceServicer_to_server)
        running = RunningSettings(PeerSettings(), None, FOLLOWED, lambda new: None)
        services = [work, files.servicer, rpc.SettingsService(running).servicer, *others]
        return await rpc.serve(services, "127.0.0.1", port, security=self.security)

    async def move_to(self, redis: RedisServer, namespace: str) -> None:
        """Register in another registry."""
        await self.registry.close()
        self.registry = Registry.connect(redis.url, namespace=namespace, timeout=30.0)
        for peer in self.workers.values():
            await self.registry.leases.register(peer.info, self._load(), TTL_S)

    async def reserved(self) -> int:
        return sum(worker.reserved_blocks + worker.reserved_tokens for worker in await self.registry.workers())

    async def close(self) -> None:
        for peer in self.workers.values():
            await peer.die()
        await self.registry.close()

    def _by_incarnation(self, incarnation: str) -> DecodePeer:
        return self._decodes[incarnation]

    def _load(self) -> WorkerLoad:
        decodes = [p.info.incarnation for p in self.workers.values() if p.info.role is Role.DECODE]
        return WorkerLoad(
            free_blocks=64, num_waiting=0, num_running=0, queued_tokens=0, linked=tuple(decodes) if self.linked else ()
        )

    async def _add(
        self, worker_id: str, role: Role, incarnation: str, revision: str, peer: WorkingPeer,
        others: list[rpc.Servicer], num_blocks: int = 64, port: int = 0,
    ) -> Peer:  # fmt: skip
        files = ModelFilesService(self.folder)
        server = await self._serve(peer, files, others, port)
        info = WorkerInfo(
            worker_id=worker_id, role=role, incarnation=incarnation, grpc_address=f"127.0.0.1:{server.port}",
            transfer_address="127.0.0.1:1" if role is Role.DECODE else "", model=self.model, revision=revision,
            layout_hash=layout_of(revision), block_size=16, num_blocks=num_blocks, max_num_seqs=64,
            max_model_len=self.max_model_len, transports=("tcp",), host="test", fingerprint=files.fingerprint,
        )  # fmt: skip
        await self.registry.leases.register(info, self._load(), TTL_S)
        heartbeat = asyncio.create_task(self._heartbeat(info))
        self.workers[worker_id] = made = Peer(info, server, peer, heartbeat, files)
        for other in self.workers.values():
            await self.registry.leases.heartbeat(other.info, self._load(), TTL_S)
        return made

    async def _heartbeat(self, info: WorkerInfo) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            with contextlib.suppress(Exception):
                await self.registry.leases.heartbeat(info, self._load(), TTL_S)


def layout_of(revision: str) -> str:
    """A worker's layout hash covers its weights."""
    return f"layout of {revision}"


@asynccontextmanager
async def peers_on(registry: Registry, reply: Reply) -> AsyncIterator[Peers]:
    peers = Peers(registry, Generator(reply))
    try:
        yield peers
    finally:
        await peers.close()


@asynccontextmanager
async def peers_of_long_prompts(settings: GatewaySettings, context: int, reply: Reply) -> AsyncIterator[Peers]:
    """One prefill and one decode worker, for prompts and answers of so many tokens."""
    registry = Registry.connect(settings.redis_url, namespace=settings.namespace, timeout=30.0)
    async with peers_on(registry, reply) as peers:
        peers.max_model_len, peers.folder = context, folder_of(context)
        await peers.add_decode(num_blocks=context // 4)
        await peers.add_prefill()
        yield peers
