"""The hot routes. One request:

1 read      body, within its bounds; refused here if its answer would come too late; fields checked; prompt tokenized
2 wait      for the first delta: a failure within pings.HEAD_S still gets an HTTP status of its own. Then a stream's
            head is sent, and comments until there is an event
3 write     one event per delta, or all deltas as one body
4 end       whichever comes first: the answer's end, an error, the deadline, the client's disconnect

All but the first end cancel the answer, which frees everything it holds on workers.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any, Self

import structlog
from starlette.types import Receive, Scope, Send

from services.gateway.admission import NO_TARGETS, priority_of, targets_of
from services.gateway.bodies import BodyReader, Incoming
from services.gateway.deadlines import STALLED_S
from services.gateway.directory import LLM, ModelDirectory
from services.gateway.door import pings
from services.gateway.door.dialect import OPENAI, Dialect
from services.gateway.door.exchange import ClientLeft, Exchange, check_left
from services.gateway.door.parsed import CheckTurn, Framing, ParsedBody, Terms
from services.gateway.door.waking import Waking
from services.gateway.errors import GatewayError, InvalidRequest, TimedOut, Unavailable, unexpected
from services.gateway.generation import (
    CLIENT_LEFT,
    Answer,
    Delta,
    Generation,
    check_salt,
    tracing,
)
from services.gateway.model import SESSION, ServedModel
from services.gateway.shared import Shared
from tandem.machine.garbage import let_go

log = structlog.get_logger(__name__)
ADMIN_BYTES = 64 * 1024
ReadBody = Callable[[LLM, Incoming[Any], CheckTurn], Awaitable[ParsedBody]]
RespondTo = Callable[[LLM, Incoming[Any]], Awaitable[Any]]


class Endpoint(ABC):
    """An ASGI app for one path."""

    dialect = OPENAI

    def __init__(self, shared: Shared) -> None:
        self._shared = shared

    def speaking(self, dialect: Dialect) -> Self:
        """Set the protocol that errors and ends of streams are written in."""
        self.dialect = dialect
        return self

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send, self._shared.new_id, lambda: self._shared.state.leaving, self.dialect)
        try:
            await self._serve(exchange)
        except ClientLeft:  # or it has sent a malformed body and waits
            self._shared.metrics.request("none", CLIENT_LEFT)
            await exchange.fail(InvalidRequest("the body is malformed, or ended too early", code="incomplete_body"), {})
        except GatewayError as error:
            await exchange.fail(error, {})
            let_go(error)
        except Exception as error:
            log.error("request failed", request_id=exchange.request_id, exc_info=error)
            await exchange.fail(unexpected(exchange.request_id), {})
            let_go(error)
        finally:
            exchange.abandon()

    @abstractmethod
    async def _serve(self, exchange: Exchange) -> None:
        """Answer one request. Raises GatewayError | ClientLeft."""


class AdminEndpoint(Endpoint):
    """An endpoint for keys that may manage models: a short body in, one out."""

    def __init__(self, shared: Shared, respond: Callable[[bytes], Awaitable[Any]]) -> None:
        super().__init__(shared)
        self._respond = respond

    async def _serve(self, exchange: Exchange) -> None:
        self._shared.access.authenticate(exchange.headers).check_manages()
        body = await exchange.body(ADMIN_BYTES, self._shared.deadlines)
        await exchange.json(200, await self._respond(body), {})


class TextEndpoint(Endpoint):
    """An endpoint that the gateway answers without workers, such as /tokenize. Tenants take turns."""

    def __init__(self, directory: ModelDirectory, respond: RespondTo, reader: BodyReader[Any]) -> None:
        super().__init__(directory.shared)
        self._directory, self._respond, self._reader = directory, respond, reader

    async def _serve(self, exchange: Exchange) -> None:
        shared, directory = self._shared, self._directory
        client, deadline = shared.access.authenticate(exchange.headers), exchange.deadline(shared)
        tenant, settings = shared.access.tenant(client, exchange.headers, "", "user"), shared.settings
        try:
            with shared.deadlines.until(deadline):
                body = await exchange.body(settings.max_body_bytes, shared.deadlines)
                left = deadline - asyncio.get_running_loop().time()
                counted = shared.allowances.one(client, tenant, exchange.request_id, left)

                async def respond(user: str) -> Any:
                    """Answer within a turn, which is given back while a model is woken."""
                    async with shared.text_turns.turn(tenant, len(body), deadline):
                        llm = await directory.llm_for(body, tenant, user or exchange.headers.get(SESSION, ""))
                        incoming = await llm.read(self._reader, body, tenant)
                        directory.served(llm, incoming.body.model, client)
                        return await self._respond(llm, incoming)

                async with counted as headers:
                    answer = await directory.once_awake(respond, client, deadline, Waking(exchange).tell)
        except TimeoutError:
            raise TimedOut("the request's deadline passed") from None
        await exchange.json(200, answer, headers)


class GenerateEndpoint(Endpoint):
    """An endpoint whose answers workers write, streamed or whole."""

    def __init__(
        self,
        directory: ModelDirectory,
        read: ReadBody,
        reader: BodyReader[Any],
        wall: Callable[[], float],
    ) -> None:
        super().__init__(directory.shared)
        self._directory = directory
        self._read, self._reader = read, reader
        self._wall = wall

    async def _serve(self, exchange: Exchange) -> None:
        shared, settings = self._shared, self._shared.settings
        try:
            asked = _Asked(self._directory, exchange)
            with shared.deadlines.until(asked.deadline):
                await shared.intake.begin()
                body = await exchange.body(settings.max_body_bytes, shared.deadlines)
                check_left(asked.deadline)  # the timer itself may be late
                found, answer = await self._begin(asked, body)
        except TimeoutError:
            late = TimedOut("the request's deadline passed while its body was read")
            self._note_refused(exchange, late)
            raise late from None
        except GatewayError as error:
            self._note_refused(exchange, error)
            raise
        try:
            while not await self._answered(exchange, found, answer, asked):
                with shared.deadlines.until(asked.deadline):
                    found, answer = await self._begin(asked, body)
        except TimeoutError:
            raise TimedOut("the request's deadline passed") from None
        except GatewayError as error:
            await exchange.fail(error, answer.path_headers())
            let_go(error)

    async def _begin(self, asked: _Asked, body: bytes) -> tuple[ParsedBody, Answer]:
        """Raises GatewayError."""
        llm = await asked.choose(body)
        found = await self._read(llm, await llm.read(self._reader, body, asked.owner), asked.check_turn)
        return found, llm.answer(asked.generation(found), found.param)

    async def _answered(self, exchange: Exchange, found: ParsedBody, answer: Answer, asked: _Asked) -> bool:
        """True unless the model lost its workers before anything was sent while another model of the alias has some.

        Raises GatewayError.
        """
        try:
            detach = found.detach and found.detach(exchange, found.framing(answer, int(self._wall())), answer)
            await self._supervise(exchange, detach or self._write(exchange, found, answer), asked.deadline)
        except Unavailable:
            if not asked.elsewhere():
                raise
            return False
        return True

    def _note_refused(self, exchange: Exchange, error: GatewayError) -> None:
        model = self._directory.only_name
        self._shared.refuse(exchange.headers, exchange.request_id, error, exchange.arrived, model)

    async def _supervise(self, exchange: Exchange, writing: Awaitable[None], deadline: float) -> None:
        """Write the answer until its client disconnects or its deadline passes."""
        bound = self._shared.deadlines.until(deadline + STALLED_S)
        try:
            with bound:
                exchange.watch_left(bound.expire)
                await writing
        except TimeoutError:
            if not bound.expired:
                raise
            if not exchange.has_left:
                raise TimedOut("the request's deadline passed") from None

    async def _write(self, exchange: Exchange, found: ParsedBody, answer: Answer) -> None:
        envelope = found.framing(answer, int(self._wall()))
        async with aclosing(answer.deltas()) as deltas:
            begin = b""
            if answer.request.streamed:
                begin = envelope.begin()
                seconds = pings.BEGIN_S if begin else pings.HEAD_S
                exchange.open_within(seconds, answer.limit_headers, envelope.failure, begin)
            first = await anext(deltas)
            if answer.request.streamed:
                await exchange.open(answer.path_headers(), envelope.failure, begin)
                await self._write_event(exchange, envelope, first)
                answer.write_at_once(partial(self._write_at_once, exchange, envelope))
                async for delta in deltas:
                    await self._write_event(exchange, envelope, delta)
            else:
                await self._write_whole(exchange, envelope, answer, first, deltas)
        if answer.request.streamed:
            exchange.hold(await envelope.last())
            await exchange.close()

    async def _write_event(self, exchange: Exchange, envelope: Framing, delta: Delta) -> None:
        """Write a delta's events; the last one is held and leaves together with the end of the stream."""
        await exchange.written()
        await envelope.prepare(delta)
        if envelope.ends_with(delta):
            exchange.hold(envelope.chunk(delta))
        elif event := envelope.event(delta):
            await exchange.event(event)

    def _write_at_once(self, exchange: Exchange, envelope: Framing, delta: Delta) -> bool:
        event = envelope.event(delta)
        return not event or exchange.event_at_once(event)

    async def _write_whole(
        self, exchange: Exchange, envelope: Framing, answer: Answer, first: Delta, deltas: AsyncIterator[Delta]
    ) -> None:
        choices: list[list[Delta]] = [[] for _ in answer.choices]
        choices[first.choice].append(first)
        async for delta in deltas:
            choices[delta.choice].append(delta)
        whole = envelope.gathered(choices)
        for delta in whole:
            await envelope.prepare(delta)
        await exchange.json(200, await envelope.whole(whole), answer.path_headers())


class _Asked:
    """A request as its headers describe it: client, tenant, deadline; then the model that it is for."""

    def __init__(self, directory: ModelDirectory, exchange: Exchange) -> None:
        """Raises GatewayError."""
        self._directory, self._exchange, shared = directory, exchange, directory.shared
        self.client = shared.access.authenticate(exchange.headers)
        self.deadline = exchange.deadline(shared)
        self.owner = shared.access.tenant(self.client, exchange.headers, "", "user")  # the body may name another tenant
        self._tenant, self._priority, self._targets = "", 0, NO_TARGETS
        self._llm: LLM | None = None
        self._model: ServedModel | None = None

    async def choose(self, body: bytes) -> LLM:
        """Raises GatewayError."""
        if (only := self._directory.only_llm()) is not None:
            self._llm = only
            return only
        session = self._exchange.headers.get(SESSION, "")

        async def find(user: str) -> LLM:
            return await self._directory.llm_for(body, self.owner, user or session)

        before = self._llm.via if self._llm else None
        llm = await self._directory.once_awake(find, self.client, self.deadline, Waking(self._exchange).tell)
        if before and llm.via:
            llm.via = replace(llm.via, left=before.model)
        self._llm = llm
        return llm

    def elsewhere(self) -> bool:
        """True if nothing was sent, the chosen model lost its workers, and another model of the alias has some."""
        via = self._llm.via if self._llm else None
        return via is not None and not self._exchange.answered and self._directory.answers_elsewhere(via)

    def check_turn(self, terms: Terms, max_tokens: int | None) -> str:
        """Returns the tenant, having refused what would come too late.

        Raises:
            GatewayError: its answer would come too late, or what it says of itself is wrong.
        """
        llm, headers = self._llm, self._exchange.headers
        assert llm is not None
        self._model = self._directory.served(llm, terms.model, self.client)
        self._tenant = llm.shared.access.tenant(self.client, headers, terms.user, "user")
        self._priority = priority_of(terms.service_tier, terms.priority)
        end_by = self.deadline if self._exchange.names_deadline else inf
        self._targets = targets_of(headers, self._priority, llm.shared.settings, end_by)
        llm.pipeline.check_turn(self._priority, self._tenant, self.deadline, max_tokens, self._targets)
        return self._tenant

    def generation(self, found: ParsedBody) -> Generation:
        """Returns the request for the pipeline. Call after `check_turn`."""
        terms, llm, exchange = found.terms, self._llm, self._exchange
        assert llm is not None
        assert self._model is not None
        return Generation(
            operation=found.operation,
            request_id=exchange.request_id,
            model=self._model,
            prompts=found.prompts,
            n=found.n,
            given=found.given,
            sampling=found.sampling,
            deadline=self.deadline,
            arrived=exchange.arrived,
            priority=self._priority,
            targets=self._targets,
            tenant=self._tenant,
            client=self.client,
            cache_salt=llm.shared.access.cache_salt(self._tenant, check_salt(terms.cache_salt)),
            speculative=terms.speculative,
            streamed=terms.streamed,
            reading=found.reading,
            dimensions=found.dimensions,
            parent=tracing.incoming(exchange.headers),
            elsewhere=self.elsewhere,
        )
