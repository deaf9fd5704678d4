"""The server's side of gRPC over the simulated network: what tandem.rpc.endpoints.serve asks of an aio.Server.

A handler is a task. It is cancelled when its client cancels the call, when the call's deadline passes on the server's
own clock, when the connection is lost, and by `stop` once the grace is over.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from grpc import StatusCode, aio

from tests.simulation.grpc_client import PATIENT, WINDOW_BYTES, Metadata
from tests.simulation.network import SimulatedEnd, SimulatedNetwork
from tests.simulation.world import Process


@dataclass(frozen=True, slots=True)
class CallDetails:
    method: str
    invocation_metadata: Metadata


class SimulatedServer:
    def __init__(self, network: SimulatedNetwork, process: Process, interceptors: Sequence[Any] = ()) -> None:
        self.network = network
        self.process = process
        self.interceptors = interceptors
        self.calls: set[Handling] = set()
        self._handlers: list[Any] = []
        self._ends: set[SimulatedEnd] = set()
        self._addresses: list[str] = []
        self._stopping = False

    def add_generic_rpc_handlers(self, handlers: Sequence[Any]) -> None:
        self._handlers += handlers

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        pass  # the generic ones say the same

    def add_insecure_port(self, address: str) -> int:
        """
        Raises:
            RuntimeError: it is in use.
        """
        try:
            bound = self.network.listen(self.process, address, self._accept, pings=True)
        except OSError as error:
            raise RuntimeError(str(error)) from None
        self._addresses.append(bound)
        return int(bound.rpartition(":")[2])

    async def start(self) -> None:
        pass

    async def stop(self, grace: float | None) -> None:
        """No new calls; those running may end within `grace` seconds, then they are cancelled."""
        self._stopping = True
        for address in self._addresses:
            self.network.unlisten(address)
        self._addresses.clear()
        for end in self._ends:
            end.send(("goaway", 0))
        if self.calls and grace:
            await asyncio.wait([call.task for call in self.calls], timeout=grace)
        running = [call.task for call in self.calls]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        for end in list(self._ends):
            end.close("the server has stopped")
        self._ends.clear()

    def find(self, details: CallDetails) -> Any:
        return next((found for handler in self._handlers if (found := handler.service(details))), None)

    def _accept(self, end: SimulatedEnd) -> None:
        if self._stopping:
            end.close()
            return
        self._ends.add(end)
        calls: dict[int, Handling] = {}

        def received(frame: tuple[Any, ...]) -> None:
            kind, number, *rest = frame
            if kind == "call":
                if not self._stopping:
                    calls[number] = Handling(self, end, number, *rest, ended=lambda: calls.pop(number, None))
            elif (call := calls.get(number)) is not None:
                call.received(kind, *rest)

        def lost(reason: str) -> None:
            self._ends.discard(end)
            for call in list(calls.values()):
                call.task.cancel()

        end.received, end.lost = received, lost


class Handling:
    """One call at its handler, and the context that the handler sees."""

    def __init__(
        self, server: SimulatedServer, end: SimulatedEnd, number: int, method: str, metadata: Metadata,
        timeout: float | None, *, ended: Callable[[], object],
    ) -> None:  # fmt: skip
        self._server = server
        self._end = end
        self._number = number
        self.method = method
        self._details = CallDetails(method, metadata)
        self._requests: deque[bytes] = deque()
        self._half_closed = False
        self._window = WINDOW_BYTES
        self._unread_bytes = 0
        self._changed: asyncio.Future[None] | None = None
        self._code, self._text, self._trailing = StatusCode.OK, "", ()
        self._serialize: Any = None
        self._deserialize: Any = None
        self._ended = ended
        loop = server.process
        self._deadline = None if timeout is None else loop.time() + timeout
        self.task = loop.create_task(self._run())
        timed = timeout is not None and PATIENT not in metadata
        self._timer = loop.call_later(timeout or 0.0, self.task.cancel) if timed else None
        server.calls.add(self)
        self.task.add_done_callback(self._done)

    def received(self, kind: str, *rest: Any) -> None:
        if kind == "message":
            self._requests.append(rest[0])
        elif kind == "done":
            self._half_closed = True
        elif kind == "window":
            self._window += rest[0]
        elif kind == "cancel":
            self.task.cancel()
        self._wake()

    # --- the context ---

    def invocation_metadata(self) -> Metadata:
        return self._details.invocation_metadata

    def set_trailing_metadata(self, metadata: Metadata) -> None:
        self._trailing = tuple(metadata)

    def trailing_metadata(self) -> Metadata:
        return self._trailing

    async def send_initial_metadata(self, metadata: Metadata) -> None:
        pass

    def set_code(self, code: StatusCode) -> None:
        self._code = code

    def code(self) -> StatusCode:
        return self._code

    def set_details(self, details: str) -> None:
        self._text = details

    def details(self) -> str:
        return self._text

    def time_remaining(self) -> float | None:
        return None if self._deadline is None else max(0.0, self._deadline - self._server.process.time())

    def cancelled(self) -> bool:
        return self.task.cancelling() > 0

    def done(self) -> bool:
        return self.task.done()

    def peer(self) -> str:
        return f"simulated:{self._end.peer.process.name}"

    async def abort(self, code: StatusCode, details: str = "", trailing_metadata: Metadata = ()) -> NoReturn:
        self._code, self._text = code, details
        self._trailing = tuple(trailing_metadata) or self._trailing
        raise aio.AbortError("Locally aborted.")

    async def read(self) -> Any:
        while not self._requests:
            if self._half_closed:
                return aio.EOF
            await self._wait()
        data = self._requests.popleft()
        self._unread_bytes += len(data)
        if self._unread_bytes > WINDOW_BYTES // 2:
            self._end.send(("window", self._number, self._unread_bytes))
            self._unread_bytes = 0
        return self._deserialize(data)

    async def write(self, response: Any) -> None:
        data = self._serialize(response)
        self._window -= len(data)
        self._end.send(("message", self._number, data))
        while self._window < 0:
            await self._wait()

    # --- the handler ---

    async def _run(self) -> None:
        try:
            await self._handle()
        except aio.AbortError:
            pass
        except asyncio.CancelledError:
            self._code, self._text = StatusCode.CANCELLED, "the call was cancelled"
            if self.time_remaining() == 0:
                self._code, self._text = StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded"
            elif self._server._stopping:
                self._code, self._text = StatusCode.UNAVAILABLE, "the server is stopping"
            raise
        except Exception as error:
            self._code, self._text = StatusCode.UNKNOWN, f"Unexpected {type(error)}: {error}"
            self._server.process.world.errors.append(f"{self._details.method}: {error!r}")
        finally:
            self._end.send(("status", self._number, self._code, self._text, self._trailing))

    async def _handle(self) -> None:
        handler = await self._find(list(self._server.interceptors), self._details)
        if handler is None:
            await self.abort(StatusCode.UNIMPLEMENTED, f"Method not found: {self._details.method}")
        self._serialize = handler.response_serializer or bytes
        self._deserialize = handler.request_deserializer or bytes
        behavior = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
        requests = self._iterate() if handler.request_streaming else await self.read()
        if handler.response_streaming:
            async for response in behavior(requests, self):
                await self.write(response)
        else:
            await self.write(await behavior(requests, self))

    async def _find(self, interceptors: list[Any], details: CallDetails) -> Any:
        if not interceptors:
            return self._server.find(details)
        first, *others = interceptors

        async def continuation(details: CallDetails) -> Any:
            return await self._find(others, details)

        return await first.intercept_service(continuation, details)

    async def _iterate(self) -> AsyncIterator[Any]:
        while (request := await self.read()) is not aio.EOF:
            yield request

    def _done(self, task: asyncio.Task[None]) -> None:
        if self._timer:
            self._timer.cancel()
        self._server.calls.discard(self)
        self._ended()

    async def _wait(self) -> None:
        if self._changed is None or self._changed.done():
            self._changed = self._server.process.create_future()
        await self._changed

    def _wake(self) -> None:
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)
