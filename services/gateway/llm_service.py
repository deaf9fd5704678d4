"""LLMService: the gRPC door. Errors are statuses whose message names the field; cancelling a call frees everything.

Trailers say which path the request took, as the headers of HTTP do; so does the last message, as `path`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from typing import Any

from google.protobuf.json_format import MessageToDict
from google.rpc import error_details_pb2, status_pb2
from grpc import aio
from opentelemetry import context as otel_context

from services.gateway.errors import GatewayError, InvalidRequest
from services.gateway.generation import (
    Answer,
    Delta,
    Generation,
    Structure,
    check_salt,
    read_sampling,
    read_speculative,
    truncated,
)
from services.gateway.llm import LLM
from services.gateway.priority import PriorityClass
from services.gateway.text import ROLES, TemplateOptions
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
                yield _response(answer, delta)

    async def GenerateUnary(
        self, request: llm_pb2.GenerateUnaryRequest, context: Context
    ) -> llm_pb2.GenerateUnaryResponse:
        answer = await self._answer(request.generate, context)
        choices = [llm_pb2.Choice(index=i) for i in range(answer.request.n)]
        texts: list[list[str]] = [[] for _ in choices]
        async with aclosing(answer.deltas()) as deltas, _with_trailers(answer, context):
            async for delta in deltas:
                texts[delta.choice].append(delta.text)
                choices[delta.choice].MergeFrom(_choice(delta))
        for choice, parts in zip(choices, texts, strict=True):
            choice.text = "".join(parts)
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
            client = self._llm.access.authenticate(_metadata(context))
        except GatewayError as error:
            raise _refused(error, context, {}) from None
        longest = self._llm.max_model_len
        models = [
            llm_pb2.Model(id=model.name, max_model_len=longest, parent=model.parent)
            for model in self._llm.models(client)
        ]
        return llm_pb2.ListModelsResponse(models=models)

    async def LoadLoraAdapter(
        self, request: llm_pb2.LoadLoraAdapterRequest, context: Context
    ) -> llm_pb2.LoadLoraAdapterResponse:
        try:
            self._llm.access.authenticate(_metadata(context)).check_manages()
            await self._llm.adapters.load(request.lora_name, request.lora_path)
        except GatewayError as error:
            raise _refused(error, context, {}) from None
        return llm_pb2.LoadLoraAdapterResponse()

    async def UnloadLoraAdapter(
        self, request: llm_pb2.UnloadLoraAdapterRequest, context: Context
    ) -> llm_pb2.UnloadLoraAdapterResponse:
        try:
            self._llm.access.authenticate(_metadata(context)).check_manages()
            await self._llm.adapters.unload(request.lora_name)
        except GatewayError as error:
            raise _refused(error, context, {}) from None
        return llm_pb2.UnloadLoraAdapterResponse()

    async def _answer(self, request: llm_pb2.GenerateRequest, context: Context) -> Answer:
        try:
            generation, param = await self._read(request, context)
            return self._llm.answer(generation, param)
        except GatewayError as error:
            self._llm.metrics.request("none", error.status)
            raise _refused(error, context, {}) from None

    async def _read(self, request: llm_pb2.GenerateRequest, context: Context) -> tuple[Generation, str]:
        llm, metadata = self._llm, _metadata(context)
        client = llm.access.authenticate(metadata)
        if not request.model:
            raise InvalidRequest("model is required", "model")
        model = llm.served(request.model, client)
        n = request.n or 1
        llm.check_choices(1, n)
        prompt, param = await self._prompt(request)
        given = given_in(request.sampling)
        sampling = await read_sampling(given, model, structure=_structure(request.structured_outputs))
        if request.priority not in PRIORITIES:
            raise InvalidRequest(f"priority: {request.priority} is unknown", "priority")
        tenant = llm.access.tenant(client, metadata, request.tenant, "tenant")
        generation = Generation(
            operation="chat" if param == "messages" else "text_completion",
            request_id=request.request_id[:128] or llm.new_id(),
            model=model,
            prompts=[truncated(prompt, request.truncate_prompt_tokens or None)],
            n=n,
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
                return await self._llm.encode_chat(_messages(request.messages), _options(request.messages)), "messages"
        raise InvalidRequest("one of prompt, messages or token_ids is required", "prompt")


def _speculative(said: llm_pb2.Speculative) -> Speculative:
    return read_speculative(said.method, said.num_tokens if said.HasField("num_tokens") else None)


def _structure(said: llm_pb2.StructuredOutputs) -> Structure | None:
    kind = said.WhichOneof("kind")
    if kind is None:
        return None
    value = list(said.choice.texts) if kind == "choice" else getattr(said, kind)
    return Structure(kind, value, f"structured_outputs.{kind}")


def _options(said: llm_pb2.ChatMessages) -> TemplateOptions:
    opened = said.add_generation_prompt if said.HasField("add_generation_prompt") else not said.continue_final_message
    return TemplateOptions(opened, said.continue_final_message, MessageToDict(said.chat_template_kwargs))


def _refused(error: GatewayError, context: Context, headers: Mapping[str, str]) -> rpc.Refused:
    """The error as a status, with what a program wants to know of it in the trailers."""
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
    """The path that the answer took goes into the trailers, however it ends."""
    try:
        yield
    except GatewayError as error:
        raise _refused(error, context, answer.path_headers()) from error
    except BaseException:
        context.set_trailing_metadata(tuple(answer.path_headers().items()))
        raise
    context.set_trailing_metadata(tuple(answer.path_headers().items()))


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


def _choice(delta: Delta) -> llm_pb2.Choice:
    tokens = delta.tokens
    return llm_pb2.Choice(
        token_ids=tokens.ids, logprobs=tokens.logprobs, finish_reason=delta.finish_reason,
        prompt_logprobs=tokens.prompt_logprobs,
    )  # fmt: skip


def _response(answer: Answer, delta: Delta) -> llm_pb2.GenerateResponse:
    message = llm_pb2.GenerateResponse(
        request_id=answer.request.request_id,
        model=answer.request.model.name,
        text=delta.text,
        token_ids=delta.tokens.ids,
        logprobs=delta.tokens.logprobs,
        finish_reason=delta.finish_reason,
        index=delta.choice,
        prompt_logprobs=delta.tokens.prompt_logprobs,
    )
    if delta.finish_reason:
        message.usage.CopyFrom(answer.usage)
        message.path.CopyFrom(answer.path)
    return message
