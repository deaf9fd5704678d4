"""A decode worker of Tandem's without an engine: its side of the protocol is the real one's (tandem/worker)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from uuid import uuid4

from benchmarks.frontends.pace import BackendPace
from tandem import rpc
from tandem.engine import FinishReason, SampledToken, SequenceOutput
from tandem.registry import Registry, Role, WorkerInfo, WorkerLoad
from tandem.v1 import worker_pb2
from tandem.worker.serving.model_files import ModelFilesService
from tandem.worker.serving.service import Entry, WorkService
from tandem.worker.serving.streams import Streams
from tandem.worker.serving.suspects import SuspectTurns

TTL_S = 2.0


class _Sequence:
    def __init__(self, worker: _Sequences, stream_id: str, spec: worker_pb2.SequenceSpec) -> None:
        self._worker, self._stream_id = worker, stream_id
        self._request_id, self._last = spec.request_id, spec.sampling.max_tokens - 1

    def write(self, index: int) -> None:
        worker, ended = self._worker, index == self._last
        token = SampledToken(worker.letters[index % len(worker.letters)])
        reason = FinishReason.LENGTH if ended else None
        output = SequenceOutput(self._request_id, index, [token], reason, finished=ended)
        worker.streams.send(self._stream_id, output)
        if ended:
            worker.live.pop(self._request_id, None)


class _Sequences:
    def __init__(self, incarnation: str, letters: list[int], pace: BackendPace) -> None:
        self.letters = letters
        self.streams = Streams(incarnation, lambda stream_id: None)
        self.live: dict[str, _Sequence] = {}
        self._pace = pace

    async def begin(self, stream_id: str, entry: Entry) -> None:
        spec = entry.sequence
        self.streams.reserved(stream_id, worker_pb2.Reserved(request_id=spec.request_id))
        made = self.live[spec.request_id] = _Sequence(self, stream_id, spec)
        self._pace.begin(made, spec.sampling.seed, spec.sampling.max_tokens)

    async def abort(self, request_id: str) -> None:
        if (sequence := self.live.pop(request_id, None)) is not None:
            self._pace.end(sequence)


@asynccontextmanager
async def null_worker(redis_url: str, model: Path, letters: list[int], pace: BackendPace) -> AsyncIterator[None]:
    """Registered and serving. `letters`: the token ids it writes, in turn."""
    incarnation = uuid4().hex
    sequences = _Sequences(incarnation, letters, pace)
    suspects = SuspectTurns(lambda: 0)
    service = WorkService(sequences.streams, lambda: uuid4().hex, sequences.begin, sequences.abort, suspects)
    files = ModelFilesService(model)
    server = await rpc.serve([service.servicer, files.servicer], "127.0.0.1", 0)
    info = WorkerInfo(
        worker_id="null", role=Role.DECODE, incarnation=incarnation, grpc_address=f"127.0.0.1:{server.port}",
        transfer_address="127.0.0.1:1", model=model.name, revision="null", layout_hash="null", block_size=16,
        num_blocks=65536, max_num_seqs=4096, max_model_len=4096, transports=("tcp",), host="here",
        fingerprint=files.fingerprint,
    )  # fmt: skip
    load = WorkerLoad(free_blocks=info.num_blocks, num_waiting=0, num_running=0, queued_tokens=0)
    registry = Registry.connect(redis_url)
    await registry.leases.register(info, load, TTL_S)
    tasks = [
        asyncio.create_task(_heartbeats(registry, info, load)), asyncio.create_task(pace.run()),
    ]  # fmt: skip
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await server.stop(0)
        await registry.close()


async def _heartbeats(registry: Registry, info: WorkerInfo, load: WorkerLoad) -> None:
    while True:
        await asyncio.sleep(TTL_S / 4)
        await registry.leases.heartbeat(info, load, TTL_S)
