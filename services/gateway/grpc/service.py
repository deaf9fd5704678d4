"""LLMService: the gRPC door. Errors are statuses that name the field; cancelling a call frees everything.

Trailers report the request's path, as headers of HTTP do; so does `path` of the last message.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from math import inf
from typing import Any

import grpc
from google.rpc import error_details_pb2, status_pb2
from grpc import aio
from opentelemetry import context as otel_context

from services.gateway.admission import PriorityClass, targets_of
from services.gateway.bodies import Incoming, truncated
from services.gateway.chat import ChatRequest, PreparedChat, prepare
from services.gateway.deadlines import STALLED_S
from services.gateway.directory import LLM, ModelDirectory
from services.gateway.door import pings
from services.gateway.errors import GatewayError, InvalidRequest, TimedOut
from services.gateway.generation import Answer, Generation, check_salt
from services.gateway.grpc.messages import choice_of, response_of, speculative_of, structure_of, tools_of
from services.gateway.grpc.reader import STREAMED, UNARY, chat_in, has_many_parts, unless_large
from services.gateway.model import SESSION
from services.gateway.tools import ToolUse
from tandem import rpc
from tandem.registry import ModelStatus
from tandem.sampling import given_in
from tandem.v1 import llm_pb2, llm_pb2_grpc

PRIORITIES = {
    llm_pb2.PRIORITY_UNSPECIFIED: PriorityClass.INTERACTIVE,
    llm_pb2.PRIORITY_REALTIME: PriorityClass.REALTIME,
    llm_pb2.PRIORITY_INTERACTIVE: PriorityClass.INTERACTIVE,
    llm_pb2.PRIORITY_BATCH: PriorityClass.BATCH,
}
NAME = "tandem.v1.LLMService"
Context = aio.ServicerContext[Any, Any]


class LLMService(llm_pb2_grpc.LLMServiceServicer):
    def __init__(self, directory: ModelDirectory) -> None:
        self._directory, self._shared = directory, directory.shared
        self.servicer = rpc.Servicer(NAME, self, _add)

    async def Generate(self, request: Any, context: Context) -> AsyncIterator[Any]:
        """`request`: a GenerateRequest; one that is large comes as bytes."""
        head = _Head(context)
        answer = await self._answer(request, context, head)
        call = asyncio.current_task()
        assert call is not None
        # While a write blocks, only this timer notices that the deadline passed.
        stalled = self._shared.deadlines.add(answer.request.deadline + STALLED_S, call.cancel)
        try:
            async with aclosing(answer.deltas()) as deltas, _with_trailers(answer, context):
                async with head.sent_within(pings.HEAD_S):
                    first = await anext(deltas)
                yield response_of(answer, first)
                async for delta in deltas:
                    yield response_of(answer, delta)
        finally:
            stalled.cancel()

    async def GenerateUnary(self, request: Any, context: Context) -> llm_pb2.GenerateUnaryResponse:
        """`request`: a GenerateUnaryRequest; one that is large comes as bytes."""
        said = request if isinstance(request, bytes) else request.generate
        answer = await self._answer(said, context, _Head(context), within=True)
        choices = [llm_pb2.Choice(index=i) for i in range(answer.request.n)]
        texts: list[list[str]] = [[] for _ in choices]
        thoughts: list[list[str]] = [[] for _ in choices]
        async with aclosing(answer.deltas()) as deltas, _with_trailers(answer, context):
            async for delta in deltas:
                texts[delta.choice].append(delta.text)
                thoughts[delta.choice].append(delta.reasoning)
                choices[delta.choice].MergeFrom(choice_of(answer, delta))
        for choice, parts, aloud in zip(choices, texts, thoughts, strict=True):
            choice.text, choice.reasoning = "".join(parts), "".join(aloud)
        first = choices[0]
        return llm_pb2.GenerateUnaryResponse(
            request_id=answer.request.request_id,
            model=answer.request.model.name,
            text=first.text,
            token_ids=first.token_ids,
            logprobs=first.logprobs,
            finish_reason=first.finish_reason,
            usage=answer.usage,
            path=answer.path,
            choices=choices,
        )

    async def ListModels(self, request: llm_pb2.ListModelsRequest, context: Context) -> llm_pb2.ListModelsResponse:
        try:
            client = self._shared.access.authenticate(_metadata(context))
        except GatewayError as error:
            raise _refused(error, context, {}) from None
        models = [
            llm_pb2.Model(
                id=one.model.name,
                max_model_len=one.max_model_len,
                parent=one.model.parent,
                fingerprint=one.llm.key.fingerprint,
                weights=one.alias.shares if one.alias else {},
                fallbacks=one.alias.fallbacks if one.alias else (),
            )
            for one in self._directory.models(client)
        ]
        models += [llm_pb2.Model(id=one.name, state=one.state) for one in self._directory.asleep(client)]
        return llm_pb2.ListModelsResponse(models=models)

    async def LoadLoraAdapter(
        self, request: llm_pb2.LoadLoraAdapterRequest, context: Context
    ) -> llm_pb2.LoadLoraAdapterResponse:
        try:
            self._shared.access.authenticate(_metadata(context)).check_manages()
            await self._directory.load_adapter(request.lora_name, request.lora_path, request.base_model_name or None)
        except GatewayError as error:
            raise _refused(error, context, {}) from None
        return llm_pb2.LoadLoraAdapterResponse()

    async def UnloadLoraAdapter(
        self, request: llm_pb2.UnloadLoraAdapterRequest, context: Context
    ) -> llm_pb2.UnloadLoraAdapterResponse:
        try:
            self._shared.access.authenticate(_metadata(context)).check_manages()
            await self._directory.unload_adapter(request.lora_name)
        except GatewayError as error:
            raise _refused(error, context, {}) from None
        return llm_pb2.UnloadLoraAdapterResponse()

    async def _answer(
        self, request: llm_pb2.GenerateRequest | bytes, context: Context, head: _Head, within: bool = False
    ) -> Answer:
        """Returns the answer to a request. `within`: the bytes are of a message that contains the request."""
        arrived = asyncio.get_running_loop().time()
        try:
            await self._shared.intake.begin()
            if isinstance(request, bytes):
                llm, body = await self._reduced(request, context, head, within)
                request = body.body
            else:
                llm, body = await self._found(request, context, head), Incoming(STREAMED, request)
            generation = await self._read(llm, body, context, arrived)
            return llm.answer(generation, body.reader.param(body.body))
        except GatewayError as error:
            named = "" if isinstance(request, bytes) else request.request_id[:128]
            self._shared.refuse(
                _metadata(context), named or self._shared.new_id(), error, arrived, self._directory.only_name
            )
            raise _refused(error, context, {}) from None

    async def _found(self, request: llm_pb2.GenerateRequest, context: Context, head: _Head) -> LLM:
        """Raises GatewayError."""
        client = self._shared.access.authenticate(_metadata(context))
        own = _metadata(context).get(SESSION, "") or request.tenant

        async def find(user: str) -> LLM:
            return self._directory.llm_of(request.model or None, user or own)

        deadline = self._shared.deadline(_left(context), "grpc-timeout")
        return await self._directory.once_awake(find, client, deadline, head.tell)

    async def _reduced(
        self, data: bytes, context: Context, head: _Head, within: bool
    ) -> tuple[LLM, Incoming[llm_pb2.GenerateRequest]]:
        """Raises GatewayError."""
        metadata = _metadata(context)
        client = self._shared.access.authenticate(metadata)
        tenant = self._shared.access.tenant(client, metadata, "", "tenant")  # the message may name another tenant
        deadline = self._shared.deadline(_left(context), "grpc-timeout")
        try:
            with self._shared.deadlines.until(deadline):
                reader = UNARY if within else STREAMED

                async def find(user: str) -> LLM:
                    own = user or metadata.get(SESSION, "")
                    return await self._directory.llm_for(data, tenant, own, reader.model_asked)

                llm = await self._directory.once_awake(find, client, deadline, head.tell)
                return llm, await llm.read_large(reader, data, tenant)
        except TimeoutError:
            raise TimedOut("the request's deadline passed while it was read") from None

    async def _read(
        self, llm: LLM, incoming: Incoming[llm_pb2.GenerateRequest], context: Context, arrived: float
    ) -> Generation:
        """Returns the request in the gateway's own terms. Raises GatewayError."""
        request, metadata = incoming.body, _metadata(context)
        client = self._shared.access.authenticate(metadata)
        if not request.model:
            raise InvalidRequest("model is required", "model")
        model = self._directory.served(llm, request.model, client)
        llm.bounds.check_choices(1, request.n or 1)
        use, priority = tools_of(request), _priority_of(request)
        deadline = self._shared.deadline(left := _left(context), "grpc-timeout")
        tenant = self._shared.access.tenant(client, metadata, request.tenant, "tenant")
        given = given_in(request.sampling)
        targets = targets_of(metadata, priority, self._shared.settings, inf if left is None else deadline)
        llm.pipeline.check_turn(priority, tenant, deadline, given.get("max_tokens"), targets)
        chat = await _prepared(llm, incoming, use, given, tenant)
        return Generation(
            operation="chat" if incoming.reader.param(request) == "messages" else "text_completion",
            request_id=request.request_id[:128] or self._shared.new_id(),
            model=model,
            prompts=[chat.ids],
            n=request.n or 1,
            given=chat.given,
            sampling=chat.sampling,
            deadline=deadline,
            arrived=arrived,
            priority=priority,
            targets=targets,
            tenant=tenant,
            client=client,
            cache_salt=self._shared.access.cache_salt(tenant, check_salt(request.cache_salt)),
            speculative=speculative_of(request.speculative) if request.HasField("speculative") else None,
            reading=chat.reading,
            parent=otel_context.get_current(),
        )


async def _prepared(
    llm: LLM, incoming: Incoming[llm_pb2.GenerateRequest], use: ToolUse | None, given: dict[str, Any], tenant: str
) -> PreparedChat:
    """Returns a request's chat, or its prompt, prepared. Raises GatewayError."""
    request, structure = incoming.body, structure_of(incoming.body.structured_outputs)
    keep_last = request.truncate_prompt_tokens or None
    if request.WhichOneof("input") != "messages":
        (said,) = llm.prompts_in(incoming)
        ids = await llm.encode(said, "prompt") if isinstance(said, str) else said
        return PreparedChat(truncated(ids, keep_last), given, await llm.sampling(given, {}, structure, tenant), None)
    chat = ChatRequest(
        prompt=chat_in(request, use) if incoming.text is None else incoming.text,
        use=use,
        structure=structure,
        effort=request.messages.reasoning_effort,
        given=given,
        salt=request.cache_salt,
        keep_last=keep_last,
    )
    return await prepare(llm, chat, tenant)


def _priority_of(request: llm_pb2.GenerateRequest) -> int:
    """Raises InvalidRequest."""
    if request.priority not in PRIORITIES:
        raise InvalidRequest(f"priority: {request.priority} is unknown", "priority")
    return PRIORITIES[request.priority].priority


def _add(service: LLMService, server: Any) -> None:
    """Register the service as the generated code does, except that large requests stay bytes.

    Parsing those here would block the event loop.
    """
    one, whole = llm_pb2.GenerateRequest, llm_pb2.GenerateUnaryRequest
    handlers = {
        "Generate": grpc.unary_stream_rpc_method_handler(
            service.Generate,
            unless_large(one.FromString, has_many_parts),
            llm_pb2.GenerateResponse.SerializeToString,
        ),
        "GenerateUnary": grpc.unary_unary_rpc_method_handler(
            service.GenerateUnary,
            unless_large(whole.FromString, lambda request: has_many_parts(request.generate)),
            llm_pb2.GenerateUnaryResponse.SerializeToString,
        ),
    }
    generated: Any = _Handlers()
    llm_pb2_grpc.add_LLMServiceServicer_to_server(service, generated)
    handlers = generated.found | handlers
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(NAME, handlers),))
    server.add_registered_method_handlers(NAME, handlers)


class _Handlers:
    """Collects a service's handlers in the place of a server."""

    def __init__(self) -> None:
        self.found: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}

    def add_generic_rpc_handlers(self, handlers: object) -> None:
        pass  # the registered handlers are the same

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        self.found |= handlers


def _refused(error: GatewayError, context: Context, headers: Mapping[str, str]) -> rpc.Refused:
    """Returns the error as a status, with trailers for programs."""
    details = status_pb2.Status(code=error.grpc.value[0], message=error.message)
    details.details.add().Pack(error_details_pb2.ErrorInfo(reason=error.code or error.type, domain="tandem"))
    if error.param is not None and isinstance(error, InvalidRequest):
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.param, description=error.message)
        details.details.add().Pack(error_details_pb2.BadRequest(field_violations=[violation]))
    packed = ("grpc-status-details-bin", details.SerializeToString())
    context.set_trailing_metadata((*headers.items(), *error.headers.items(), packed))
    return rpc.Refused(error.grpc, error.message)


@asynccontextmanager
async def _with_trailers(answer: Answer, context: Context) -> AsyncIterator[None]:
    """Put the answer's path into the trailers, however the block ends."""
    try:
        yield
    except GatewayError as error:
        raise _refused(error, context, answer.path_headers()) from error
    except BaseException:
        context.set_trailing_metadata(tuple(answer.path_headers().items()))
        raise
    context.set_trailing_metadata(tuple(answer.path_headers().items()))


class _Head:
    """The initial metadata of a call that waits for its model or its first token."""

    def __init__(self, context: Context) -> None:
        self._context, self._said = context, False

    async def tell(self, streamed: bool, status: ModelStatus) -> None:
        """Report that the call's model is starting."""
        await self._send(("x-tandem-model-state", str(status.state)), ("x-tandem-starts-in-s", f"{status.left_s:.1f}"))

    @asynccontextmanager
    async def sent_within(self, seconds: float) -> AsyncIterator[None]:
        """Send the metadata if the block takes longer than `seconds`. Otherwise it leaves with the first message."""
        sending: list[asyncio.Task[None]] = []
        timer = asyncio.get_running_loop().call_later(
            seconds, lambda: sending.append(asyncio.create_task(self._send()))
        )
        try:
            yield
        finally:
            timer.cancel()
            if sending:
                await asyncio.gather(*sending, return_exceptions=True)

    async def _send(self, *said: tuple[str, str]) -> None:
        if not self._said:
            self._said = True
            await self._context.send_initial_metadata(said)


def _left(context: Context) -> float | None:
    """Returns the seconds left of the call's deadline; None without one. Raises TimedOut."""
    left: float | None = context.time_remaining()
    if left is not None and left <= 0:
        raise TimedOut("the request's deadline passed on its way")
    return left


def _metadata(context: Context) -> dict[str, str]:
    return {name: value for name, value in context.invocation_metadata() or () if isinstance(value, str)}
