"""A channel to one incarnation of a worker, and its stream.

A worker answers while its stream is open: a killed process closes it immediately, a frozen one misses pings.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from grpc import aio

from services.gateway.errors import WorkerLost, from_status
from services.gateway.workers.stream import Judge, WorkerStream
from tandem.registry import WorkerInfo
from tandem.v1 import prefill_pb2_grpc, process_pb2_grpc, worker_pb2_grpc


class WorkerConnection:
    """A channel and stream that the pool owns and closes. `running`: the attempts that use it."""

    def __init__(
        self, info: WorkerInfo, connect: Callable[[str], aio.Channel], judge: Judge, met: bool = False
    ) -> None:
        """`met`: the worker has answered on an earlier connection.

        Raises:
            OSError: a certificate cannot be read.
        """
        self.info = info
        self.running = 0
        self._connect = connect
        self._channel = connect(info.grpc_address)
        self._closing: set[asyncio.Task[None]] = set()
        self.stream = WorkerStream(info, self._work, judge)
        self.met = met
        self._loop = asyncio.get_running_loop()
        self._seen_at = self._loop.time()
        self._task = asyncio.create_task(self.stream.run())

    @property
    def adapters(self) -> Any:
        return worker_pb2_grpc.AdapterServiceStub(self._channel)

    @property
    def traces(self) -> Any:
        return process_pb2_grpc.TraceServiceStub(self._channel)

    @property
    def prefill(self) -> Any:
        return prefill_pb2_grpc.PrefillServiceStub(self._channel)

    @property
    def connected(self) -> bool:
        """True while the worker answers."""
        answers = self.stream.open.is_set()
        if answers:
            self.met, self._seen_at = True, self._loop.time()
        return answers

    @property
    def absent_s(self) -> float:
        """Returns for how many seconds the worker has not answered."""
        return 0.0 if self.connected else self._loop.time() - self._seen_at

    @property
    def lost(self) -> bool:
        """True if the worker has answered before but does not now."""
        return not self.connected and self.met

    @property
    def broken(self) -> str:
        """Returns why the connection's task died, which is a bug; "" if it runs."""
        task = self._task
        if not task.done() or task.cancelled() or task.exception() is None:
            return ""
        return repr(task.exception())

    async def call(self, method: Any, request: Any, *, timeout: float) -> Any:
        """Returns the reply to a unary call.

        Raises:
            GatewayError: the worker refused, or was lost.
        """
        try:
            return await method(request, timeout=timeout)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise WorkerLost(self.info.worker_id, "its link was closed") from None
        except aio.UsageError:
            raise WorkerLost(self.info.worker_id, "its link is closed") from None
        except aio.AioRpcError as error:
            raise from_status(self.info.worker_id, error.code(), error.details() or "") from None

    async def close(self, reason: str) -> None:
        self.stream.close(reason)
        self._task.cancel()
        await asyncio.gather(self._task, *self._closing, return_exceptions=True)
        await self._channel.close(None)

    def _work(self, anew: bool) -> Any:
        """Returns the worker's stream method; `anew`: on a new channel, as gRPC would reuse a dead connection.

        Raises:
            OSError: as the constructor does.
        """
        if anew:
            old, self._channel = self._channel, self._connect(self.info.grpc_address)
            closing = asyncio.create_task(old.close(None))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
        stub: Any = worker_pb2_grpc.WorkerServiceStub(self._channel)
        return stub.Work()
