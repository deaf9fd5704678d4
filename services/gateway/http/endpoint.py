"""The hot routes. One request:

1 read      body, within its bounds; refused here if its answer would come too late; fields checked; prompt tokenized
2 wait      for the first delta: until it is there, a failure still has an HTTP status of its own
3 write     one event per delta, or all deltas as one body
4 end       whichever comes first: the answer's end, an error, the deadline, the client's disconnect

All but the first end cancel the answer, which frees everything it holds on workers.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from functools import partial
from typing import Any

import structlog
from starlette.types import Receive, Scope, Send

from services.gateway.access import Client
from services.gateway.errors import GatewayError, InvalidRequest, TimedOut, unexpected
from services.gateway.generation import (
    CLIENT_LEFT,
    TOO_MANY,
    Answer,
    Delta,
    Generation,
    check_salt,
    read_speculative,
    tracing,
)
from services.gateway.http.exchange import ClientLeft, Exchange, deadline_of
from services.gateway.http.format import CheckTurn, Envelope, ParsedBody, joined
from services.gateway.http.schema import GenerationBody
from services.gateway.llm import LLM
from services.gateway.priority import priority_of
from services.gateway.targets import targets_of

log = structlog.get_logger(__name__)
# A client that does not read may not keep its request alive.
STALLED_S = 0.5


class Endpoint(ABC):
    """An ASGI app for one path."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send, self._llm.new_id, lambda: self._llm.leaving)
        try:
            await self._serve(exchange)
        except ClientLeft:  # or it has sent what is no body, and waits
            self._llm.metrics.request("none", CLIENT_LEFT)
            await exchange.fail(InvalidRequest("the body is malformed, or ended too early", code="incomplete_body"), {})
        except GatewayError as error:
            await exchange.fail(error, {})
        except Exception as error:
            log.error("request failed", request_id=exchange.request_id, exc_info=error)
            await exchange.fail(unexpected(exchange.request_id), {})

    @abstractmethod
    async def _serve(self, exchange: Exchange) -> None:
        """Answer it.

        Raises:
            GatewayError | ClientLeft
        """


class JsonEndpoint(Endpoint):
    """One body in, one out, nothing of the cluster asked for."""

    def __init__(self, llm: LLM, respond: Callable[[LLM, bytes], Awaitable[Any]], manages: bool = False) -> None:
        super().__init__(llm)
        self._respond, self._manages = respond, manages

    async def _serve(self, exchange: Exchange) -> None:
        client = self._llm.access.authenticate(exchange.headers)
        if self._manages:
            client.check_manages()
        settings = self._llm.settings
        body = await exchange.body(settings.max_body_bytes, settings.body_timeout_s)
        await exchange.json(200, await self._respond(self._llm, body), {})


class GenerateEndpoint(Endpoint):
    """Answers as they are written."""

    def __init__(
        self,
        llm: LLM,
        read: Callable[[LLM, bytes, CheckTurn], Awaitable[ParsedBody]],
        wall: Callable[[], float],
    ) -> None:
        super().__init__(llm)
        self._read = read
        self._wall = wall

    async def _serve(self, exchange: Exchange) -> None:
        try:
            client = self._llm.access.authenticate(exchange.headers)
            deadline = deadline_of(exchange.headers, self._llm)
            async with asyncio.timeout_at(deadline):
                settings = self._llm.settings
                body = await exchange.body(settings.max_body_bytes, settings.body_timeout_s)
                found = await self._read(self._llm, body, partial(self._check_turn, exchange, client, deadline))
            answer = self._llm.answer(self._generation(exchange, client, found, deadline), found.param)
        except TimeoutError:
            self._llm.metrics.request("none", TimedOut.status)
            raise TimedOut("the request's deadline passed while its body was read") from None
        except GatewayError as error:
            self._llm.metrics.request("none", error.status)
            if error.status == TOO_MANY:
                self._llm.metrics.refused(asyncio.get_running_loop().time() - exchange.arrived)
            raise
        try:
            await self._supervise(exchange, self._write(exchange, found, answer), deadline)
        except GatewayError as error:
            await exchange.fail(error, answer.path_headers())

    def _check_turn(
        self, exchange: Exchange, client: Client, deadline: float, body: GenerationBody, max_tokens: int | None
    ) -> None:
        tenant = self._llm.access.tenant(client, exchange.headers, body.user or "", "user")
        priority = priority_of(body.service_tier, body.priority)
        targets = targets_of(exchange.headers, priority, self._llm.settings)
        self._llm.pipeline.check_turn(priority, tenant, deadline, max_tokens, targets.ttft_s)

    def _generation(self, exchange: Exchange, client: Client, found: ParsedBody, deadline: float) -> Generation:
        body, access = found.body, self._llm.access
        tenant = access.tenant(client, exchange.headers, body.user or "", "user")
        priority = priority_of(body.service_tier, body.priority)
        return Generation(
            operation=found.operation,
            request_id=exchange.request_id,
            model=self._llm.served(body.model, client),
            prompts=found.prompts,
            n=found.n,
            given=found.given,
            sampling=found.sampling,
            deadline=deadline,
            arrived=exchange.arrived,
            priority=priority,
            targets=targets_of(exchange.headers, priority, self._llm.settings),
            tenant=tenant,
            client=client,
            cache_salt=access.cache_salt(tenant, check_salt(body.cache_salt or "")),
            speculative=read_speculative(said.method, said.num_tokens) if (said := body.speculative) else None,
            streamed=bool(body.stream),
            reading=found.reading,
            parent=tracing.incoming(exchange.headers),
        )

    async def _supervise(self, exchange: Exchange, writing: Awaitable[None], deadline: float) -> None:
        """Write the answer for as long as there is anyone to write it to."""
        loop, left = asyncio.get_running_loop(), asyncio.create_task(exchange.wait_left())
        bound = asyncio.timeout_at(deadline + STALLED_S)

        def stop(_: asyncio.Task[None]) -> None:
            if not bound.expired():
                bound.reschedule(loop.time())

        left.add_done_callback(stop)
        try:
            async with bound:
                try:
                    await writing
                finally:
                    left.remove_done_callback(stop)
        except TimeoutError:
            if not bound.expired():
                raise
            if not left.done():
                raise TimedOut("the request's deadline passed") from None
        finally:
            left.cancel()

    async def _write(self, exchange: Exchange, found: ParsedBody, answer: Answer) -> None:
        envelope = Envelope(found, answer, int(self._wall()))
        async with aclosing(answer.deltas()) as deltas:
            every = _chain(await anext(deltas), deltas)
            if answer.request.streamed:
                await exchange.open(answer.path_headers())
                await self._write_events(exchange, envelope, every)
            else:
                await self._write_whole(exchange, envelope, answer, every)
        if answer.request.streamed:
            if envelope.with_usage:
                await exchange.event(envelope.usage_chunk())
            await exchange.close()

    async def _write_events(self, exchange: Exchange, envelope: Envelope, deltas: AsyncIterator[Delta]) -> None:
        async for delta in deltas:
            if delta.says_something or envelope.with_token_ids:
                await exchange.event(envelope.chunk(delta))

    async def _write_whole(
        self, exchange: Exchange, envelope: Envelope, answer: Answer, deltas: AsyncIterator[Delta]
    ) -> None:
        choices: list[list[Delta]] = [[] for _ in answer.outcomes]
        async for delta in deltas:
            choices[delta.choice].append(delta)
        await exchange.json(200, envelope.whole([joined(parts) for parts in choices]), answer.path_headers())


async def _chain(first: Delta, rest: AsyncGenerator[Delta, None]) -> AsyncIterator[Delta]:
    yield first
    async for delta in rest:
        yield delta
