"""Background responses: kept from their beginning, and reported by any gateway.

    POST ──> kept as queued ──> a task of this gateway: events to the store each BEAT_S ──> kept as it ended
                                                       └── cancelled or deleted there: it ends, and nothing more is kept
    GET at any gateway ──> the record; the events so far, and those to come

A mark in the store says that its gateway lives; without it, what has not ended has failed.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any

import orjson
import structlog

from services.gateway.apis.responses.events import ResponseEvents
from services.gateway.apis.responses.kept.kept import Kept
from services.gateway.deadlines import STALLED_S
from services.gateway.directory import LLM
from services.gateway.door import Exchange, Framing
from services.gateway.errors import GatewayError, InvalidRequest, TimedOut, Unavailable, unexpected
from services.gateway.generation import Answer

log = structlog.get_logger(__name__)
BEAT_S = 0.25
# A gateway without a beat for this long is gone.
ALIVE_S = 10
RUNNING = ("queued", "in_progress")
NUMBER = re.compile(rb'"sequence_number":(\d+)')
LAST = -1  # index of the last event
ENDS = tuple(f"event: response.{end}\n".encode() for end in ("completed", "incomplete", "failed", "cancelled"))


@dataclass(frozen=True, slots=True)
class Background:
    llm: LLM
    kept: Kept
    items: bytes

    async def start(self, exchange: Exchange, framing: Framing, answer: Answer) -> None:
        """Answer with the queued response, or its events, and generate it in a task.

        Raises:
            GatewayError: the response could not be kept.
        """
        assert isinstance(framing, ResponseEvents)
        queued = framing.response("queued")
        await self.kept.beat(framing.id, [], ALIVE_S)
        if not await self.kept.keep(queued, self.items):
            raise Unavailable("background: the response cannot be kept", code="store_unavailable")
        run = _Run(self, framing, answer)
        self.llm.shared.detached(run.run())
        if not answer.request.streamed:
            await exchange.json(200, queued, {})
            return
        with self.llm.shared.deadlines.until(answer.request.deadline + STALLED_S):
            await send_events(exchange, self.kept, framing.id, -1)


class _Run:
    """One response being generated."""

    def __init__(self, background: Background, events: ResponseEvents, answer: Answer) -> None:
        self._llm, self._kept = background.llm, background.kept
        self._events, self._answer = events, answer
        self._said = b""  # events that are not in the store yet
        self._cancelled = False

    async def run(self) -> None:
        beating = asyncio.create_task(self._beat())
        writing = asyncio.create_task(self._write())
        try:
            await asyncio.wait({beating, writing}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (beating, writing):
                task.cancel()
            await asyncio.gather(beating, writing, return_exceptions=True)
        if not self._cancelled:
            await self._tell()

    async def _write(self) -> None:
        events, deadline = self._events, self._answer.request.deadline
        self._said += events.begin()
        try:
            with self._llm.shared.deadlines.until(deadline):
                async with aclosing(self._answer.deltas()) as deltas:
                    async for delta in deltas:
                        self._said += events.chunk(delta)
            if not await self._is_cancelled():
                self._said += await events.last()
                if not events.is_kept:
                    raise Unavailable("the response is too large to be kept", code="too_large")
        except TimeoutError:
            await self._fail(TimedOut("the request's deadline passed"))
        except GatewayError as error:
            await self._fail(error)
        except Exception as error:
            log.error("a response failed", response=events.id, exc_info=error)
            await self._fail(unexpected(events.id))

    async def _fail(self, error: GatewayError) -> None:
        self._said += self._events.failure(error)
        if not await self._is_cancelled():
            await self._events.keep_failed(error)

    async def _beat(self) -> None:
        """Write beats until the task is cancelled or a client cancels the response."""
        while not await self._is_cancelled():
            await self._tell()
            await asyncio.sleep(BEAT_S)

    async def _tell(self) -> None:
        said, self._said = self._said, b""
        try:
            await self._kept.beat(self._events.id, split(said), ALIVE_S)
        except BaseException as error:
            self._said = said + self._said  # events that are sent twice are stored once
            if not isinstance(error, Unavailable):
                raise
            log.warning("events are not kept", response=self._events.id, error=error.message)

    async def _is_cancelled(self) -> bool:
        with suppress(Unavailable):
            self._cancelled = self._cancelled or await self._kept.is_cancelled(self._events.id)
        return self._cancelled


def split(events: bytes) -> list[bytes]:
    return [event + b"\n\n" for event in events.split(b"\n\n") if event]


async def current(kept: Kept, response_id: str) -> dict[str, Any]:
    """Returns the response as it is now; failed if its gateway is gone. Raises NotKept | Unavailable."""
    found: dict[str, Any] = orjson.loads(await kept.response(response_id))
    if found["status"] not in RUNNING or await kept.is_alive(response_id):
        return found
    found = orjson.loads(await kept.response(response_id))  # its end may have been kept meanwhile
    if found["status"] not in RUNNING:
        return found
    why = {"code": "server_error", "message": "the gateway that made this response is gone"}
    return await _ended(kept, {**found, "status": "failed", "error": why})


async def cancel(kept: Kept, response_id: str) -> dict[str, Any]:
    """
    Raises:
        NotKept | Unavailable
        InvalidRequest: the response is not a background one.
    """
    found = await current(kept, response_id)
    if not found["background"]:
        raise InvalidRequest("only a response that is made in the background can be cancelled", "id")
    if found["status"] not in RUNNING:
        return found
    await kept.cancel(response_id)
    return await _ended(kept, {**found, "status": "cancelled"})


async def _ended(kept: Kept, found: Mapping[str, Any]) -> dict[str, Any]:
    await kept.keep(found, await kept.items_of(found["id"]))
    return dict(found)


async def send_events(exchange: Exchange, kept: Kept, response_id: str, after: int) -> None:
    """Send the events after number `after` as they come. Raises GatewayError."""
    await kept.response(response_id)
    await exchange.open({}, _error_event)
    async for event in _events(kept, response_id, after):
        await exchange.event(event)
    await exchange.close()


async def _events(kept: Kept, response_id: str, after: int) -> AsyncIterator[bytes]:
    """Yields events until the end, and makes the last one for a response that was cancelled or lost its gateway."""
    while True:
        new = [event for event in await kept.events(response_id, after + 1) if _number(event) > after]
        for event in new:
            yield event
            if event.startswith(ENDS):
                return
            after = _number(event)
        if new:
            continue
        found = await current(kept, response_id)
        if found["status"] not in RUNNING:
            last = b"".join(await kept.events(response_id, LAST))
            if after > _number(last) or (after == _number(last) and last.startswith(ENDS)):
                return  # the end has been sent
            # While its gateway lives, the end may still come.
            if after == _number(last) and (found["status"] == "cancelled" or not await kept.is_alive(response_id)):
                yield _event(f"response.{found['status']}", {"response": found, "sequence_number": after + 1})
                return
        await asyncio.sleep(BEAT_S)


def _number(event: bytes) -> int:
    found = NUMBER.search(event)
    return int(found[1]) if found else -1


def _error_event(error: GatewayError) -> bytes:
    said = {"code": error.code or error.type, "message": error.message, "param": error.param, "sequence_number": 0}
    return _event("error", said)


def _event(kind: str, said: Mapping[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), orjson.dumps({"type": kind, **said}))
