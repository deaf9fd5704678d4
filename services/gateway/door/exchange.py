"""One HTTP request and its response, on bare ASGI: no object per token, one write per event.

body() -> json(...)                                             a whole answer
       -> open(headers), event(...), event(...), ..., close()   server-sent events; begun early by `open_within`
       -> fail(error)         a status and a body before the first byte, a last event after it
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Generator, Mapping
from functools import partial
from typing import Any

import orjson
import structlog
from starlette.types import Message, Receive, Scope, Send

from services.gateway.deadlines import Deadlines
from services.gateway.door.connections import SINCE_S
from services.gateway.door.dialect import OPENAI, Dialect
from services.gateway.door.encodings import decompressed, is_compressed
from services.gateway.door.pings import Pings
from services.gateway.errors import BodyTimeout, BodyTooLarge, GatewayError, InvalidRequest, TimedOut
from services.gateway.shared import Shared

log = structlog.get_logger(__name__)
FAIL_WAIT_S = 1.0
BODY_TIMEOUT_S = 30.0  # for a client to send its body
# Headers that name a deadline, and their units in a second.
TIMEOUTS = (("x-request-timeout-ms", 1000.0), ("x-request-timeout", 1.0))
# Short answers end before this, and so save the two messages between threads that watching a client costs.
WATCH_S = 0.2
SANE_ID = re.compile(r"[\x21-\x7e]{1,128}")


class ClientLeft(Exception):
    """The client disconnected."""


class Exchange:
    """One request and its response. `leaving`: the client should send its next request to another gateway."""

    def __init__(
        self, scope: Scope, receive: Receive, send: Send, new_id: Callable[[], str], leaving: Callable[[], bool],
        dialect: Dialect = OPENAI,
    ) -> None:  # fmt: skip
        self.headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        self.request_id = request_id_of(self.headers, new_id)
        self.scope = scope
        self.arrived = asyncio.get_running_loop().time()
        self._since_s: float = scope.get(SINCE_S, 0.0)
        self._dialect = dialect
        self._receive = receive
        self._send = send
        self._keeps_alive = scope["http_version"].startswith("1")
        self._leaving = leaving
        self._closing = False
        self._failure: Callable[[GatewayError], bytes] | None = None  # makes a stream's last event after an error
        self._last = False  # the connection cannot be reused
        self._held = b""
        # One object for all events, as each is read immediately.
        self._event: Message = {"type": "http.response.body", "more_body": True}
        self._unwritten: _Begun | None = None
        self._pings = Pings(self._dialect.ping, send)
        self._left: asyncio.Task[None] | None = None
        self._watch: asyncio.TimerHandle | None = None
        self.also: dict[str, str] = {}  # headers besides the response's own
        self.started = False
        self.opened = False  # the stream can report a failure by an event
        self.answered = False  # part of the answer was sent, not only comments

    @property
    def names_deadline(self) -> bool:
        """True if the request names a deadline."""
        return any(name in self.headers for name, _ in TIMEOUTS)

    def deadline(self, shared: Shared) -> float:
        """Returns the request's deadline, by x-request-timeout-ms or x-request-timeout (s), counted from its arrival.

        Raises:
            InvalidRequest
            TimedOut: the deadline has passed.
        """
        deadline = shared.deadline(*_seconds_said(self.headers)) - self._since_s
        check_left(deadline)
        return deadline

    async def body(self, limit: int, deadlines: Deadlines) -> bytes:
        """
        Raises:
            BodyTooLarge: more than `limit` bytes.
            BodyTimeout: the body took longer than BODY_TIMEOUT_S.
            UnsupportedEncoding | InvalidRequest: the body is compressed, but not by gzip, or wrongly.
            ClientLeft
        """
        compressed = is_compressed(self.headers.get("content-encoding", ""))
        bound = deadlines.until(self.arrived + BODY_TIMEOUT_S)
        try:
            with bound:
                body = await self._body(limit)
                return await asyncio.to_thread(decompressed, body, limit) if compressed else body
        except TimeoutError:
            if not bound.expired:
                raise
            self._last = True
            raise BodyTimeout(f"the body was not sent within {BODY_TIMEOUT_S:g} s", code="body_timeout") from None

    async def _body(self, limit: int) -> bytes:
        whole = _length(self.headers)
        if whole > limit:
            raise BodyTooLarge(f"the body must not be larger than {limit} bytes", code="body_too_large")
        parts, size = [], 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientLeft
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > limit:
                raise BodyTooLarge(f"the body must not be larger than {limit} bytes", code="body_too_large")
            if size == whole > 0 or not message.get("more_body"):  # the end needs no message of its own
                return b"".join(parts)

    @property
    def has_left(self) -> bool:
        """True once `watch_left` has seen the client disconnect."""
        return self._left is not None and self._left.done()

    def watch_left(self, then: Callable[[], object] | None = None, after_s: float = WATCH_S) -> None:
        """Call `then` when the client disconnects, watching from `after_s` on. Only after `body`, until `abandon`."""

        def watch() -> None:
            if self._left is None:
                self._left = asyncio.create_task(self._wait_left())
            if then is not None:
                self._left.add_done_callback(lambda _: then())

        if self._watch is not None:
            self._watch.cancel()
        if self._left is None and after_s:
            self._watch = asyncio.get_running_loop().call_later(after_s, watch)
        else:
            watch()

    async def _wait_left(self) -> None:
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                return

    async def json(self, status: int, content: Any, headers: Mapping[str, str]) -> None:
        await self._start(status, "application/json", headers)
        await self._write(orjson.dumps(content), more=False)

    def open_within(
        self, seconds: float, headers: Callable[[], Mapping[str, str]], failure: Callable[[GatewayError], bytes],
        begin: bytes,
    ) -> None:  # fmt: skip
        """Begin a stream by `begin`, or by a comment, unless `open` or `fail` is called within `seconds`."""

        async def open_early() -> None:
            self.answered = bool(begin)
            await self._open(headers(), failure)
            await self._write(begin or self._dialect.ping, more=True)

        self._pings.begin(seconds, open_early)

    async def open(
        self, headers: Mapping[str, str], failure: Callable[[GatewayError], bytes], begin: bytes = b""
    ) -> None:
        """Begin a stream of events by `begin`, unless it was begun early.

        Args:
            failure: returns the last event after an error.
        """
        await self._pings.sent()
        begins, self.answered = not self.answered, True
        await self._open(headers, failure)
        self._pings.go_on()
        if begin and begins:
            await self.event(begin)

    async def _open(self, headers: Mapping[str, str], failure: Callable[[GatewayError], bytes]) -> None:
        self._failure, self.opened = failure, True
        await self._start_events(headers)

    async def comment(self, text: str) -> None:
        """Write a comment, which no client shows; begin the stream if necessary."""
        if self._failure is None:
            self._failure = partial(self._dialect.failure, request_id=self.request_id)
            await self._start_events({})
        await self._write(f": {text}\n\n".encode(), more=True)

    async def event(self, event: bytes) -> None:
        self._pings.put_off()
        await self._write(event, more=True)

    def event_at_once(self, event: bytes) -> bool:
        """Write an event without waiting. Returns False if the client reads slowly: then await `written` first."""
        self._pings.put_off()
        self._event["body"] = event
        steps = self._send(self._event).__await__()
        try:
            waits_for = next(steps)
        except StopIteration:
            return True
        self._unwritten = _Begun(steps, waits_for)
        return False

    async def written(self) -> None:
        """Wait until the client has taken the event that `event_at_once` left."""
        if (unwritten := self._unwritten) is not None:
            self._unwritten = None
            await unwritten

    def hold(self, event: bytes) -> None:
        """Keep an event until the end of the stream, to leave together with it."""
        self._held += event

    async def close(self) -> None:
        self._closing = True
        await self._pings.end()
        await self._write(self._held + self._dialect.done, more=False)

    async def fail(self, error: GatewayError, headers: Mapping[str, str]) -> None:
        """End the request by an error. A client that does not read it within FAIL_WAIT_S does not get it."""
        if self._closing:
            log.warning("a client did not read the end of its answer", request_id=self.request_id, error=error.message)
            return
        try:
            async with asyncio.timeout(FAIL_WAIT_S):
                await self.written()
                await self._pings.end()
                if not self.started:
                    said = self._dialect.body(error, self.request_id)
                    await self.json(self._dialect.status(error), said, {**headers, **error.headers})
                elif self._failure is not None:
                    await self._write(self._held + self._failure(error), more=False)
        except TimeoutError:
            log.warning("a client did not read its error", request_id=self.request_id, error=error.message)

    def abandon(self) -> None:
        """Stop writing, and release what refers to the answer."""
        self._pings.abandon()
        self._failure = None  # it refers to the answer, which may refer back
        if self._watch is not None:
            self._watch.cancel()
        if self._left is not None:
            self._left.cancel()
        # Their callbacks refer back to this object: without this the cycle would wait for the garbage collector.
        self._watch = self._left = None

    async def _start_events(self, headers: Mapping[str, str]) -> None:
        if not self.started:
            await self._start(200, "text/event-stream; charset=utf-8", {**headers, "cache-control": "no-cache"})

    async def _start(self, status: int, content_type: str, headers: Mapping[str, str]) -> None:
        self.started = True
        named = {"content-type": content_type, self._dialect.id_header: self.request_id}
        named |= self._dialect.headers({**headers, **self.also})
        if self._keeps_alive and (self._last or self._leaving()):
            named["connection"] = "close"
        raw = [(name.encode("latin-1"), value.encode("latin-1", "replace")) for name, value in named.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})

    async def _write(self, data: bytes, more: bool) -> None:
        message: Message = {"type": "http.response.body", "body": data, "more_body": more}
        await self._send(message)


class _Begun:
    """An awaitable whose first step was taken already; awaiting it runs the remaining steps."""

    def __init__(self, steps: Generator[Any, Any, Any], waits_for: object) -> None:
        self._steps, self._waits_for = steps, waits_for

    def __await__(self) -> Generator[Any, Any, Any]:
        yield self._waits_for
        yield from self._steps


def request_id_of(headers: Mapping[str, str], new_id: Callable[[], str]) -> str:
    """Returns the client's x-request-id if it is fit for headers and logs, else a new id."""
    said = headers.get("x-request-id", "")
    return said if SANE_ID.fullmatch(said) else new_id()


def check_left(deadline: float) -> None:
    """Raises TimedOut."""
    if asyncio.get_running_loop().time() >= deadline:
        raise TimedOut("the request's deadline passed before it was begun")


def _seconds_said(headers: Mapping[str, str]) -> tuple[float | None, str | None]:
    for name, unit in TIMEOUTS:
        if name in headers:
            try:
                return float(headers[name]) / unit, name
            except ValueError:
                raise InvalidRequest(f"{name} must be a number, got {headers[name]!r}", name) from None
    return None, None


def _length(headers: Mapping[str, str]) -> int:
    said = headers.get("content-length", "")
    return int(said) if said.isascii() and said.isdigit() else 0
