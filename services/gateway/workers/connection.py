"""A channel to one incarnation of a worker, and what hangs on it: its stubs, and for decode its token stream.

A decode worker answers while its token stream is open, a prefill worker while its channel is connected: a killed
process shows at once, a frozen one by its missing keepalives, both sooner than by the lease in the registry.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from grpc import ChannelConnectivity, aio

from services.gateway.errors import GatewayError, WorkerLost, from_status
from services.gateway.workers.token_stream import TokenStream
from tandem.registry import Role, WorkerInfo
from tandem.v1 import decode_pb2_grpc, prefill_pb2_grpc, worker_pb2_grpc


class WorkerConnection:
    """Owned by the pool, which closes it. `running` counts the attempts that use it."""

    def __init__(self, info: WorkerInfo, channel: aio.Channel, new_id: Callable[[], str]) -> None:
        self.info = info
        self.running = 0
        self.prefill: Any = prefill_pb2_grpc.PrefillServiceStub(channel)
        self.adapters: Any = worker_pb2_grpc.AdapterServiceStub(channel)
        self.decode: Any = decode_pb2_grpc.DecodeServiceStub(channel)
        self.stream = TokenStream(info, self.decode, new_id)
        self._channel = channel
        self._channel_ready = False
        self._met = False
        self._task = asyncio.create_task(self.stream.run() if info.role is Role.DECODE else self._watch_channel())

    @property
    def connected(self) -> bool:
        """Whether the worker answers now."""
        connected = self.stream.open.is_set() if self.info.role is Role.DECODE else self._channel_ready
        self._met |= connected
        return connected

    @property
    def lost(self) -> bool:
        """Whether the worker has answered once, and no longer does."""
        return not self.connected and self._met

    @property
    def broken(self) -> str:
        """Why the connection's task died, if it did: a bug."""
        task = self._task
        if not task.done() or task.cancelled() or task.exception() is None:
            return ""
        return repr(task.exception())

    async def call(
        self,
        method: Any,
        request: Any,
        *,
        timeout: float,
        metadata: Sequence[tuple[str, str]] = (),
        unless: asyncio.Future[GatewayError] | None = None,
        wait_for_ready: bool = False,
    ) -> Any:
        """One unary call within `timeout` seconds; given up as soon as `unless` holds an error.

        Raises:
            GatewayError: the worker's refusal, its loss, or the error of `unless`.
        """
        call = asyncio.ensure_future(_answer(method, request, timeout, metadata, wait_for_ready))
        try:
            await asyncio.wait({call, unless} if unless else {call}, return_when=asyncio.FIRST_COMPLETED)
            if unless is not None and unless.done():
                raise unless.result()
            if call.cancelled():
                raise WorkerLost(self.info.worker_id, "its link was closed")
            return call.result()
        except aio.UsageError:
            raise WorkerLost(self.info.worker_id, "its link is closed") from None
        except aio.AioRpcError as error:
            raise from_status(self.info.worker_id, error.code(), error.details() or "") from None
        finally:
            _end(call)

    async def close(self, reason: str) -> None:
        self.stream.close(reason)
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self._channel.close(None)

    async def _watch_channel(self) -> None:
        """Follow the channel's state until cancelled or closed; it reconnects by itself."""
        state = self._channel.get_state(try_to_connect=True)
        while state is not ChannelConnectivity.SHUTDOWN:
            self._channel_ready = state is ChannelConnectivity.READY
            self._met |= self._channel_ready
            await self._channel.wait_for_state_change(state)
            state = self._channel.get_state(try_to_connect=True)


async def _answer(
    method: Any, request: Any, timeout: float, metadata: Sequence[tuple[str, str]], wait_for_ready: bool
) -> Any:
    return await method(request, timeout=timeout, metadata=metadata, wait_for_ready=wait_for_ready)


def _end(call: asyncio.Task[Any]) -> None:
    """Cancel the call, or take note of an error that nobody asks for any more."""
    if not call.done():
        call.cancel()
    elif not call.cancelled():
        call.exception()
