"""A worker's side of its gateways' streams: each entry of a message runs as a task with a trace of its own.

reservation, prefill ── begin ──> an answer or an error ──> the outbox of the entry's stream
abort                ── a task that still begins is cancelled, all else is released ──> `released`
its gateway is silent ── the stream ends, see tandem/liveness/silence.py
the stream ends      ── tasks that still begin are cancelled; begun sequences end by Streams' on_ended
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any, TypeAlias, cast

import structlog
from grpc import StatusCode, aio
from opentelemetry import context as otel_context
from opentelemetry import propagate

from tandem import rpc
from tandem.liveness import MOST_S, Liveness
from tandem.v1 import worker_pb2, worker_pb2_grpc
from tandem.worker.engine import EngineDied
from tandem.worker.errors import SequenceFailed, lacks_room
from tandem.worker.serving.streams import Streams
from tandem.worker.serving.suspects import SuspectTurns

log = structlog.get_logger(__name__)
BUG = "INTERNAL", "internal error; the worker's log tells more"
NO_ROOM = "UNAVAILABLE", "it has no memory, threads or descriptors left"
Entry: TypeAlias = worker_pb2.Reservation | worker_pb2.Prefill


def failure_of(error: Exception | None) -> tuple[str, str]:
    """Returns the status code and the message that a gateway gets for an error."""
    if isinstance(error, SequenceFailed):
        return error.code, str(error)
    if isinstance(error, EngineDied):
        return "UNAVAILABLE", str(error)
    return NO_ROOM if error is not None and lacks_room(error) else BUG


class WorkService(worker_pb2_grpc.WorkerServiceServicer):
    """The gRPC service.

    `begin(stream_id, entry)` answers by `streams`; `abort(request_id)` returns when all is released.
    """

    def __init__(
        self,
        streams: Streams,
        new_id: Callable[[], str],
        begin: Callable[[str, Entry], Awaitable[None]],
        abort: Callable[[str], Awaitable[None]],
        suspects: SuspectTurns,
    ) -> None:
        self._streams, self._new_id, self._suspects = streams, new_id, suspects
        self._begin, self._abort = begin, abort
        self._beginning: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._aborting: set[asyncio.Task[None]] = set()
        self.servicer = rpc.Servicer(
            "tandem.v1.WorkerService", self, worker_pb2_grpc.add_WorkerServiceServicer_to_server
        )

    async def Work(
        self, requests: AsyncIterator[worker_pb2.WorkRequest], context: aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[worker_pb2.WorkResponse]:
        stream_id, serving = self._new_id(), cast("asyncio.Task[Any]", asyncio.current_task())
        liveness = Liveness(asyncio.get_running_loop().time(), self._streams.starvation)
        reading = asyncio.create_task(self._read(stream_id, requests, liveness))
        silent: list[str] = []
        watching = asyncio.create_task(self._watch(stream_id, liveness, serving, silent))
        # If a call is cancelled while it writes, only the end of its task is sure to be noticed.
        serving.add_done_callback(lambda done: (reading.cancel(), watching.cancel()))
        async for response in self._streams.stream(stream_id):
            yield response
        if reading.done():  # else this side ended the stream, and the gateway gets the reason
            await reading  # raises what is wrong with a request
        if silent:
            raise rpc.Refused(StatusCode.ABORTED, silent[0])

    async def _watch(self, stream_id: str, liveness: Liveness, serving: asyncio.Task[Any], silent: list[str]) -> None:
        """Sends pings, and ends a stream whose gateway has stopped sending pings; `silent` gets the reason.

        A call that is just writing ends once its gateway reads on, or within MOST_S. If its task were cancelled
        immediately, gRPC would send no status, and the gateway would wait.
        """
        now = asyncio.get_running_loop().time
        while not (liveness.lost(now()) and liveness.pings):
            if liveness.ping_due(now()):
                self._streams.ping(stream_id)
            await asyncio.sleep(liveness.due_s(now()))
        log.warning("a gateway is silent", stream_id=stream_id, seconds=round(liveness.limit_s, 1))
        silent.append(f"the gateway was silent for {liveness.limit_s:.1f} s")
        self._streams.end(stream_id)
        await asyncio.sleep(MOST_S)
        serving.cancel()

    async def _read(self, stream_id: str, requests: AsyncIterator[worker_pb2.WorkRequest], liveness: Liveness) -> None:
        now = asyncio.get_running_loop().time
        try:
            async for request in requests:
                liveness.heard_at = now()
                if request.HasField("pulse"):
                    liveness.heard(request.pulse.starvation, now())
                self._streams.passed_on(stream_id, request.num_passed_on)
                for reservation in request.reservations:
                    self._start(stream_id, reservation)
                for prefill in request.prefills:
                    self._start(stream_id, prefill)
                for request_id in request.aborts:
                    task = asyncio.create_task(self._end(stream_id, request_id))
                    self._aborting.add(task)
                    task.add_done_callback(self._aborted)
        except rpc.Refused:
            raise
        except Exception as error:  # any error of gRPC for a call that has ended
            log.warning("a gateway's stream cannot be read", stream_id=stream_id, error=str(error))
        finally:
            self._streams.end(stream_id)
            for (beginning_on, _), task in list(self._beginning.items()):
                if beginning_on == stream_id:
                    task.cancel()

    def _start(self, stream_id: str, entry: Entry) -> None:
        key = stream_id, entry.sequence.request_id
        if key in self._beginning:
            self._streams.fail(*key, "ALREADY_EXISTS", f"request_id: {key[1]!r} begins already")
            return
        task = self._beginning[key] = asyncio.create_task(self._run(stream_id, entry))
        task.add_done_callback(partial(self._begun, key))

    def _begun(self, key: tuple[str, str], task: asyncio.Task[None]) -> None:
        """Ends the stream if a failure could not be reported (out of memory), so that the gateway notices."""
        del self._beginning[key]
        if not task.cancelled() and task.exception() is not None:
            self._streams.end(key[0])

    async def _run(self, stream_id: str, entry: Entry) -> None:
        sequence = entry.sequence
        if sequence.trace_context:
            otel_context.attach(propagate.extract(sequence.trace_context))
        try:
            async with self._suspects.turn(sequence):
                await self._begin(stream_id, entry)
        except Exception as error:
            self._streams.fail(stream_id, sequence.request_id, *failure_of(error))
            if not isinstance(error, SequenceFailed):
                log.error("a sequence could not begin", request_id=sequence.request_id, exc_info=error)

    async def _end(self, stream_id: str, request_id: str) -> None:
        beginning = self._beginning.get((stream_id, request_id))
        if beginning is not None:
            beginning.cancel()
            await asyncio.wait([beginning])
        await self._abort(request_id)
        self._streams.released(stream_id, request_id)

    def _aborted(self, task: asyncio.Task[None]) -> None:
        self._aborting.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("a sequence could not be released", exc_info=task.exception())
