"""The client's side of gRPC over the simulated network: what a generated stub asks of a channel, and no more.

    IDLE ── asked for ──> CONNECTING ──> READY ── connection lost ──> IDLE
                             └──> TRANSIENT_FAILURE, tried again after a pause, until READY

A call that meets TRANSIENT_FAILURE fails, unless it said wait_for_ready. One that is under way when its connection is
lost fails with UNAVAILABLE. Deadlines run on the client's clock. Messages are bytes on their way.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Callable, Generator, Sequence
from functools import partialmethod
from itertools import count
from typing import Any, NamedTuple

from grpc import ChannelConnectivity, StatusCode, aio

from tests.simulation.network import SimulatedEnd, SimulatedNetwork
from tests.simulation.world import Process

# As tandem/rpc/endpoints.py sets them: the first pause before another try, the longest, and how long a try may take.
FIRST_PAUSE_S, LONGEST_PAUSE_S, ATTEMPT_S = 0.1, 1.0, 5.0
Metadata = Sequence[tuple[str, str]]
# Who calls with it waits for ever, and so shows whether the server keeps the call's deadline by itself.
PATIENT = ("patient", "yes")


class Channel:
    """A channel of `process` to `address`."""

    def __init__(self, network: SimulatedNetwork, process: Process, address: str) -> None:
        self.process = process
        self.network = network
        self._address = address
        self._state = ChannelConnectivity.IDLE
        self._state_changed = asyncio.Event()
        self._transport: _Transport | None = None
        self._waiting: list[SimulatedCall] = []
        self._calls: set[SimulatedCall] = set()
        self._pause_s = FIRST_PAUSE_S
        self._timer: asyncio.TimerHandle | None = None
        self._attempts = count(1)
        self._attempt = 0
        self._why_failed = ""

    def _method(
        self, name: str, request_serializer: Any = None, response_deserializer: Any = None,
        _registered_method: Any = 0, *, streams_requests: bool,
    ) -> Callable[..., SimulatedCall]:  # fmt: skip
        method = Method(name, request_serializer or bytes, response_deserializer or bytes, streams_requests)
        return _caller(self, method)

    unary_unary = unary_stream = partialmethod(_method, streams_requests=False)
    stream_unary = stream_stream = partialmethod(_method, streams_requests=True)

    def get_state(self, try_to_connect: bool = False) -> ChannelConnectivity:
        if try_to_connect and self._state is ChannelConnectivity.IDLE:
            self._connect()
        return self._state

    async def wait_for_state_change(self, last_observed_state: ChannelConnectivity) -> None:
        while self._state is last_observed_state:
            await self._state_changed.wait()

    async def channel_ready(self) -> None:
        while self.get_state(try_to_connect=True) is not ChannelConnectivity.READY:
            await self.wait_for_state_change(self._state)

    async def close(self, grace: float | None = None) -> None:
        if self._state is ChannelConnectivity.SHUTDOWN:
            return
        if grace and self._calls:
            await asyncio.wait([asyncio.ensure_future(call.wait_done()) for call in self._calls], timeout=grace)
        self._enter(ChannelConnectivity.SHUTDOWN)
        if self._timer:
            self._timer.cancel()
        for call in list(self._calls):
            call.end(StatusCode.CANCELLED, "Channel closed!", tell=True, by_us=True)
        if self._transport:
            self._transport.end.close()

    # --- for calls ---

    def start(self, call: SimulatedCall) -> None:
        if self._state is ChannelConnectivity.SHUTDOWN:
            raise aio.UsageError("Channel is closed.")
        self._calls.add(call)
        if self._state is ChannelConnectivity.READY and self._transport:
            call.begin(self._transport)
        elif self._state is ChannelConnectivity.TRANSIENT_FAILURE and not call.wait_for_ready:
            call.end(StatusCode.UNAVAILABLE, f"failed to connect to {self._address}: {self._why_failed}")
        else:
            self._waiting.append(call)
            if self._state is ChannelConnectivity.IDLE:
                self._connect()

    def ended(self, call: SimulatedCall) -> None:
        self._calls.discard(call)
        if call in self._waiting:
            self._waiting.remove(call)

    # --- its connection ---

    def _connect(self) -> None:
        if self._state is not ChannelConnectivity.TRANSIENT_FAILURE:
            self._enter(ChannelConnectivity.CONNECTING)
        self._attempt = attempt = next(self._attempts)
        self._timer = self.process.call_later(
            max(ATTEMPT_S, self._pause_s), self._failed, attempt, "connection attempt timed out"
        )
        self.network.connect(
            self.process, self._address,
            lambda end: self._connected(attempt, end), lambda reason: self._failed(attempt, reason),
        )  # fmt: skip

    def _connected(self, attempt: int, end: SimulatedEnd) -> None:
        if attempt != self._attempt or self._state is ChannelConnectivity.SHUTDOWN:
            end.close()
            return
        if self._timer:
            self._timer.cancel()
        self._pause_s = FIRST_PAUSE_S
        self._transport = _Transport(self, end)
        self._enter(ChannelConnectivity.READY)
        waiting, self._waiting = self._waiting, []
        for call in waiting:
            call.begin(self._transport)

    def _failed(self, attempt: int, reason: str) -> None:
        if attempt != self._attempt or self._state is ChannelConnectivity.SHUTDOWN:
            return
        self._attempt = 0
        if self._timer:
            self._timer.cancel()
        self._why_failed = reason
        self._enter(ChannelConnectivity.TRANSIENT_FAILURE)
        for call in [call for call in self._waiting if not call.wait_for_ready]:
            call.end(StatusCode.UNAVAILABLE, reason)
        self._timer = self.process.call_later(self._pause_s, self._connect)
        self._pause_s = min(LONGEST_PAUSE_S, self._pause_s * 1.6)

    def disconnected(self, transport: _Transport) -> None:
        """It takes no new calls; those it has may go on."""
        if transport is self._transport:
            self._transport = None
            if self._state is not ChannelConnectivity.SHUTDOWN:
                self._enter(ChannelConnectivity.IDLE)

    def _enter(self, state: ChannelConnectivity) -> None:
        if state is not self._state:
            self._state = state
            self._state_changed.set()
            self._state_changed = asyncio.Event()


class _Transport:
    """One connection of a channel, and the calls on it."""

    def __init__(self, channel: Channel, end: SimulatedEnd) -> None:
        self.end = end
        self.calls: dict[int, SimulatedCall] = {}
        self.numbers = count(1)
        self._channel = channel
        end.received, end.lost = self._received, self._lost

    def _received(self, frame: tuple[Any, ...]) -> None:
        kind, number, *rest = frame
        if kind == "goaway":
            self._channel.disconnected(self)
            return
        call = self.calls.get(number)
        if call is None:
            return
        if kind == "message":
            call.take(rest[0])
        elif kind == "window":
            call.widen(rest[0])
        elif kind == "status":
            call.end(*rest)

    def _lost(self, reason: str) -> None:
        self._channel.disconnected(self)
        for call in list(self.calls.values()):
            call.end(StatusCode.UNAVAILABLE, reason)


class Method(NamedTuple):
    """A method of a service, and how its messages become bytes and again messages."""

    name: str
    serialize: Callable[[Any], bytes]
    deserialize: Callable[[bytes], Any]
    streams_requests: bool


class SimulatedCall:
    """One call, whatever its kind: awaited where it has one response, read or iterated over where it has many."""

    def __init__(
        self, channel: Channel, method: Method, requests: Any, *, timeout: float | None, metadata: Metadata,
        wait_for_ready: bool,
    ) -> None:  # fmt: skip
        self.wait_for_ready = wait_for_ready
        self._channel = channel
        self._method = method
        self._metadata = metadata
        self._messages: deque[bytes] = deque()
        self._status: tuple[StatusCode, str, Metadata] | None = None
        self._cancelled = False
        self._changed: asyncio.Future[None] | None = None
        self._transport: _Transport | None = None
        self._number = 0
        self._unsent: list[tuple[Any, ...]] = []
        self._unread_bytes = 0
        self._window = WINDOW_BYTES
        self._writer: asyncio.Task[None] | None = None
        loop = channel.process
        self._deadline = None if timeout is None else loop.time() + timeout
        timed = timeout is not None and PATIENT not in metadata
        self._timer = loop.call_later(max(0.0, timeout or 0.0), self._expire) if timed else None
        if not method.streams_requests:
            self._unsent += [("message", self._method.serialize(requests)), ("done",)]
        channel.start(self)
        if method.streams_requests and requests is not None:
            self._writer = loop.create_task(self._write_all(requests))

    # --- for who made the call ---

    def __await__(self) -> Generator[Any, None, Any]:
        return self._one().__await__()

    def __aiter__(self) -> AsyncIterator[Any]:
        return self._all()

    async def read(self) -> Any:
        """The next response, or aio.EOF.

        Raises:
            aio.AioRpcError: the call has failed.
        """
        while not self._messages:
            if self._status:
                self._raise_for_status()
                return aio.EOF
            await self._wait()
        data = self._messages.popleft()
        self._unread_bytes += len(data)
        if self._unread_bytes > WINDOW_BYTES // 2:
            self._send("window", self._unread_bytes)
            self._unread_bytes = 0
        return self._method.deserialize(data)

    async def write(self, request: Any) -> None:
        """
        Raises:
            aio.AioRpcError: the call has failed.
            asyncio.InvalidStateError: it has ended.
        """
        await self._open()
        data = self._method.serialize(request)
        self._window -= len(data)
        self._send("message", data)
        while self._window < 0:
            await self._wait()
            await self._open()

    async def done_writing(self) -> None:
        if not self._status:
            self._send("done")

    async def wait_for_connection(self) -> None:
        while self._transport is None:
            if self._status:
                self._raise_for_status()
            await self._wait()

    async def wait_done(self) -> None:
        while not self._status:
            await self._wait()

    async def code(self) -> StatusCode:
        await self.wait_done()
        assert self._status
        return self._status[0]

    async def details(self) -> str:
        await self.wait_done()
        assert self._status
        return self._status[1]

    async def trailing_metadata(self) -> aio.Metadata:
        await self.wait_done()
        assert self._status
        return aio.Metadata(*self._status[2])

    async def initial_metadata(self) -> aio.Metadata:
        return aio.Metadata()

    def cancel(self) -> bool:
        return self.end(StatusCode.CANCELLED, "Locally cancelled by application!", tell=True, by_us=True)

    def cancelled(self) -> bool:
        return self._status is not None and self._status[0] is StatusCode.CANCELLED

    def done(self) -> bool:
        return self._status is not None

    def time_remaining(self) -> float | None:
        return None if self._deadline is None else max(0.0, self._deadline - self._channel.process.time())

    # --- for the channel ---

    def begin(self, transport: _Transport) -> None:
        self._transport = transport
        self._number = next(transport.numbers)
        transport.calls[self._number] = self
        transport.end.send(("call", self._number, self._method.name, tuple(self._metadata), self.time_remaining()))
        unsent, self._unsent = self._unsent, []
        for kind, *rest in unsent:
            self._send(kind, *rest)
        self._wake()

    def take(self, data: bytes) -> None:
        self._messages.append(data)
        self._wake()

    def widen(self, num_bytes: int) -> None:
        self._window += num_bytes
        self._wake()

    def end(
        self, code: StatusCode, details: str, trailing: Metadata = (), *, tell: bool = False, by_us: bool = False
    ) -> bool:
        """False if it had ended before. `tell`: the server does not know yet."""
        if self._status:
            return False
        self._status = code, details, trailing
        self._cancelled = by_us
        if self._timer:
            self._timer.cancel()
        if self._transport:
            self._transport.calls.pop(self._number, None)
            if tell:
                self._transport.end.send(("cancel", self._number))
        if self._writer:
            self._writer.cancel()
        if by_us:
            self._messages.clear()
        self._channel.ended(self)
        self._wake()
        return True

    # --- inside ---

    async def _one(self) -> Any:
        while not self._status:
            await self._wait()
        self._raise_for_status()
        return self._method.deserialize(self._messages.popleft())

    async def _all(self) -> AsyncIterator[Any]:
        while (message := await self.read()) is not aio.EOF:
            yield message

    async def _open(self) -> None:
        await self.wait_for_connection()
        if self._status:
            self._raise_for_status()
            raise asyncio.InvalidStateError("RPC already finished.")

    async def _write_all(self, requests: Any) -> None:
        try:
            if isinstance(requests, AsyncIterable):
                async for request in requests:
                    await self.write(request)
            else:
                for request in requests:
                    await self.write(request)
            await self.done_writing()
        except (aio.AioRpcError, asyncio.InvalidStateError):
            return  # reading says so too
        except Exception:
            self.cancel()
            raise

    def _send(self, kind: str, *rest: Any) -> None:
        if self._transport is None:
            self._unsent.append((kind, *rest))
        elif not self._status or kind != "window":
            self._transport.end.send((kind, self._number, *rest))

    def _expire(self) -> None:
        self.end(StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded", tell=True)

    async def _wait(self) -> None:
        """Until anything is new. Cancelled, it cancels the call."""
        if self._changed is None or self._changed.done():
            self._changed = self._channel.process.create_future()
        try:
            await asyncio.shield(self._changed)
        except asyncio.CancelledError:
            self.cancel()
            raise

    def _wake(self) -> None:
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)

    def _raise_for_status(self) -> None:
        assert self._status
        code, details, trailing = self._status
        if self._cancelled:
            raise asyncio.CancelledError
        if code is not StatusCode.OK:
            raise aio.AioRpcError(code, aio.Metadata(), aio.Metadata(*trailing), details, "")


# What may be under way unread, as HTTP/2's window for a stream.
WINDOW_BYTES = 65535


def _caller(channel: Channel, method: Method) -> Callable[..., SimulatedCall]:
    def call(
        requests: Any = None, *, timeout: float | None = None, metadata: Metadata | None = None,
        wait_for_ready: bool | None = None, credentials: Any = None, compression: Any = None,
    ) -> SimulatedCall:  # fmt: skip
        return SimulatedCall(
            channel, method, requests, timeout=timeout, metadata=tuple(metadata or ()),
            wait_for_ready=bool(wait_for_ready),
        )  # fmt: skip

    return call
