"""LLMService: the gRPC door. Errors are statuses whose message names the field; cancelling a call frees everything.

Trailers say which path the request took, as the headers of HTTP do; so does the last message, as `path`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from typing import Any

from grpc import aio
from opentelemetry import context as otel_context

from services.gateway.errors import GatewayError, InvalidRequest
from services.gateway.generation import Answer, Delta, Generation, check_salt, read_sampling, read_speculative
from services.gateway.llm import LLM
from services.gateway.priority import PriorityClass
from services.gateway.text import ROLES
from tandem import rpc
from tandem.sampling import given_in
from tandem.speculative import Speculative
from tandem.v1 import llm_pb2, llm_pb2_grpc

PRIORITIES = {
    llm_pb2.PRIORITY_UNSPECIFIED: PriorityClass.INTERACTIVE,
    llm_pb2.PRIORITY_REALTIME: PriorityClass.REALTIME,
    llm_pb2.PRIORITY_INTERACTIVE: PriorityClass.INTERACTIVE,
    llm_pb2.PRIORITY_BATCH: PriorityClass.BATCH,
}
Context = aio.ServicerContext[Any, Any]


class LLMService(llm_pb2_grpc.LLMServiceServicer):
    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self.servicer = rpc.Servicer("tandem.v1.LLMService", self, llm_pb2_grpc.add_LLMServiceServicer_to_server)

    async def Generate(self, request: llm_pb2.GenerateRequest, context: Context) -> AsyncIterator[Any]:
        answer = await self._answer(request, context)
        async with aclosing(answer.deltas()) as deltas, _with_trailers(answer, context):
            async for delta in deltas:
                yield _message(llm_pb2.GenerateResponse, answer, delta)

    async def GenerateUnary(
        self, request: llm_pb2.GenerateUnaryRequest, context: Context
    ) -> llm_pb2.GenerateUnaryResponse:
        answer = await self._answer(request.generate, context)
        whole = llm_pb2.GenerateUnaryResponse()
        async with aclosing(answer.deltas()) as deltas, _with_trailers(answer, context):
            async for delta in deltas:
                whole.text += delta.text
                whole.MergeFrom(_message(llm_pb2.GenerateUnaryResponse, answer, delta, text=""))
        return whole

    async def ListModels(self, request: llm_pb2.ListModelsRequest, context: Context) -> llm_pb2.ListModelsResponse:
        try:
            self._llm.access.authenticate(_metadata(context))
        except GatewayError as error:
            raise rpc.Refused(error.grpc, error.message) from None
        model = llm_pb2.Model(id=self._llm.model.name, max_model_len=self._llm.max_model_len)
        return llm_pb2.ListModelsResponse(models=[model])

    async def _answer(self, request: llm_pb2.GenerateRequest, context: Context) -> Answer:
        try:
            generation, param = await self._read(request, context)
            return self._llm.answer(generation, param)
        except GatewayError as error:
            self._llm.metrics.request("none", error.status)
            context.set_trailing_metadata(tuple(error.headers.items()))
            raise rpc.Refused(error.grpc, error.message) from None

    async def _read(self, request: llm_pb2.GenerateRequest, context: Context) -> tuple[Generation, str]:
        llm, metadata = self._llm, _metadata(context)
        client = llm.access.authenticate(metadata)
        if not request.model:
            raise InvalidRequest("model is required", "model")
        model = llm.served(request.model)
        prompt, param = await self._prompt(request)
        given = given_in(request.sampling)
        sampling = read_sampling(given, model)
        if request.priority not in PRIORITIES:
            raise InvalidRequest(f"priority: {request.priority} is unknown", "priority")
        tenant = llm.access.tenant(client, metadata, request.tenant, "tenant")
        generation = Generation(
            operation="chat" if param == "messages" else "text_completion",
            request_id=request.request_id[:128] or llm.new_id(),
            model=model,
            prompts=[prompt],
            n=1,
            given=given,
            sampling=sampling,
            deadline=llm.deadline(context.time_remaining()),
            priority=PRIORITIES[request.priority].priority,
            tenant=tenant,
            client=client,
            cache_salt=llm.access.cache_salt(tenant, check_salt(request.cache_salt)),
            speculative=_speculative(request.speculative) if request.HasField("speculative") else None,
            parent=otel_context.get_current(),
        )
        return generation, param

    async def _prompt(self, request: llm_pb2.GenerateRequest) -> tuple[list[int], str]:
        match request.WhichOneof("input"):
            case "prompt":
                return await self._llm.encode(request.prompt, "prompt"), "prompt"
            case "token_ids":
                return list(request.token_ids.ids), "token_ids"
            case "messages":
                return await self._llm.encode_chat(_messages(request.messages)), "messages"
        raise InvalidRequest("one of prompt, messages or token_ids is required", "prompt")


def _speculative(said: llm_pb2.Speculative) -> Speculative:
    return read_speculative(said.method, said.num_tokens if said.HasField("num_tokens") else None)


@asynccontextmanager
async def _with_trailers(answer: Answer, context: Context) -> AsyncIterator[None]:
    """The path that the answer took goes into the trailers, however it ends."""
    headers: Mapping[str, str] = {}
    try:
        yield
    except GatewayError as error:
        headers = error.headers
        raise rpc.Refused(error.grpc, error.message) from error
    finally:
        context.set_trailing_metadata(tuple({**answer.path_headers(), **headers}.items()))


def _metadata(context: Context) -> dict[str, str]:
    return {name: value for name, value in context.invocation_metadata() or () if isinstance(value, str)}


def _messages(said: llm_pb2.ChatMessages) -> list[Any]:
    if not said.messages:
        raise InvalidRequest("messages must not be empty", "messages")
    for i, message in enumerate(said.messages):
        if message.role not in ROLES:
            raise InvalidRequest(
                f"messages[{i}].role must be one of {', '.join(ROLES)}, got {message.role!r}", f"messages[{i}].role"
            )
    return [{"role": ROLES[message.role], "content": message.content} for message in said.messages]


def _message(kind: Callable[..., Any], answer: Answer, delta: Delta, text: str | None = None) -> Any:
    message = kind(
        request_id=answer.request.request_id,
        model=answer.request.model.name,
        text=delta.text if text is None else text,
        token_ids=delta.tokens.ids,
        logprobs=delta.tokens.logprobs,
        finish_reason=delta.finish_reason,
    )
    if delta.finish_reason:
        message.usage.CopyFrom(answer.usage)
        message.path.CopyFrom(answer.path)
    return message
