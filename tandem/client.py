"""A client of the gateway's gRPC API, asyncio and plain.

    async with AsyncClient("127.0.0.1:50051") as client:          with Client("127.0.0.1:50051") as client:
        answer = await client.generate("def ", max_tokens=16)         answer = client.generate("def ", max_tokens=16)
        async for part in client.stream("def "):                      for part in client.stream("def "):
            print(part.text)                                              print(part.text)

A call that has got no answer yet is repeated when the gateway is unavailable, by gRPC itself; what has begun is not, so
no token comes twice. Leaving a stream early cancels it, and the cluster frees what it holds. Errors are grpc.RpcError:
`field_violations` tells what is wrong with which field.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypedDict, Unpack

import grpc
from google.rpc import error_details_pb2, status_pb2
from grpc import aio

from tandem.rpc import CHANNEL_OPTIONS
from tandem.v1 import llm_pb2, llm_pb2_grpc

RETRIES = {
    "methodConfig": [
        {
            "name": [{"service": "tandem.v1.LLMService"}],
            "retryPolicy": {
                "maxAttempts": 5,
                "initialBackoff": "0.1s",
                "maxBackoff": "1s",
                "backoffMultiplier": 2,
                "retryableStatusCodes": ["UNAVAILABLE"],
            },
        }
    ]
}
OPTIONS = [*CHANNEL_OPTIONS, ("grpc.enable_retries", 1), ("grpc.service_config", json.dumps(RETRIES))]
DETAILS = "grpc-status-details-bin"

# Text to continue, its tokens, messages of a chat ({"role", "content"}), or a whole request.
Prompt = str | Sequence[int] | Sequence[Mapping[str, str]] | llm_pb2.GenerateRequest


class Options(TypedDict, total=False):
    """The options that are used most; a GenerateRequest takes everything."""

    model: str
    max_tokens: int
    temperature: float | None
    top_p: float | None
    top_k: int
    stop: Sequence[str]
    seed: int | None
    n: int
    json_schema: Mapping[str, object]


def request_of(prompt: Prompt, options: Options) -> llm_pb2.GenerateRequest:
    if isinstance(prompt, llm_pb2.GenerateRequest):
        return prompt
    request = llm_pb2.GenerateRequest(
        model=options.get("model", ""),
        n=options.get("n", 0),
        sampling=llm_pb2.SamplingParams(
            max_tokens=options.get("max_tokens"),
            temperature=options.get("temperature"),
            top_p=options.get("top_p"),
            top_k=options.get("top_k"),
            stop=options.get("stop", ()),
            seed=options.get("seed"),
        ),
    )
    if isinstance(prompt, str):
        request.prompt = prompt
    else:
        _put(request, prompt)
    if "json_schema" in options:
        request.structured_outputs.json = json.dumps(options["json_schema"])
    return request


def field_violations(error: grpc.RpcError) -> dict[str, str]:
    """Faults of a request by field; empty where no field is."""
    trailers: Any = getattr(error, "trailing_metadata", tuple)() or ()
    found: dict[str, str] = {}
    for packed in (value for name, value in trailers if name == DETAILS):
        for detail in status_pb2.Status.FromString(packed).details:
            wrong = error_details_pb2.BadRequest()
            if detail.Unpack(wrong):
                found |= {violation.field: violation.description for violation in wrong.field_violations}
    return found


class AsyncClient:
    def __init__(self, address: str, api_key: str = "", timeout_s: float = 600.0) -> None:
        """`timeout_s` bounds each answer."""
        self._channel = aio.insecure_channel(address, options=OPTIONS)
        self._service = llm_pb2_grpc.LLMServiceStub(self._channel)
        self._metadata = _metadata(api_key)
        self._timeout_s = timeout_s

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._channel.close(None)

    async def models(self) -> list[llm_pb2.Model]:
        asked = llm_pb2.ListModelsRequest()
        found = await self._service.ListModels(asked, timeout=self._timeout_s, metadata=self._metadata)
        return list(found.models)

    async def generate(self, prompt: Prompt, **options: Unpack[Options]) -> llm_pb2.GenerateUnaryResponse:
        """The whole answer. Raises grpc.aio.AioRpcError."""
        request = llm_pb2.GenerateUnaryRequest(generate=await self._named(request_of(prompt, options)))
        return await self._service.GenerateUnary(request, timeout=self._timeout_s, metadata=self._metadata)

    async def stream(
        self, prompt: Prompt, **options: Unpack[Options]
    ) -> AsyncGenerator[llm_pb2.GenerateResponse, None]:
        """Its parts as they are written. Raises grpc.aio.AioRpcError."""
        request = await self._named(request_of(prompt, options))
        call = self._service.Generate(request, timeout=self._timeout_s, metadata=self._metadata)
        try:
            async for part in call:
                yield part
        finally:
            call.cancel()

    async def _named(self, request: llm_pb2.GenerateRequest) -> llm_pb2.GenerateRequest:
        """Without a model, the first that the gateway serves."""
        if not request.model:
            request.model = _first(await self.models())
        return request


class Client:
    def __init__(self, address: str, api_key: str = "", timeout_s: float = 600.0) -> None:
        """`timeout_s` bounds each answer."""
        self._channel = grpc.insecure_channel(address, options=OPTIONS)
        self._service = llm_pb2_grpc.LLMServiceStub(self._channel)
        self._metadata = _metadata(api_key)
        self._timeout_s = timeout_s

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._channel.close()

    def models(self) -> list[llm_pb2.Model]:
        asked = llm_pb2.ListModelsRequest()
        return list(self._service.ListModels(asked, timeout=self._timeout_s, metadata=self._metadata).models)

    def generate(self, prompt: Prompt, **options: Unpack[Options]) -> llm_pb2.GenerateUnaryResponse:
        """The whole answer. Raises grpc.RpcError."""
        request = llm_pb2.GenerateUnaryRequest(generate=self._named(request_of(prompt, options)))
        return self._service.GenerateUnary(request, timeout=self._timeout_s, metadata=self._metadata)

    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> Generator[llm_pb2.GenerateResponse, None, None]:
        """Its parts as they are written. Raises grpc.RpcError."""
        request = self._named(request_of(prompt, options))
        call = self._service.Generate(request, timeout=self._timeout_s, metadata=self._metadata)
        try:
            yield from call
        finally:
            call.cancel()  # type: ignore[no-untyped-call]

    def _named(self, request: llm_pb2.GenerateRequest) -> llm_pb2.GenerateRequest:
        """Without a model, the first that the gateway serves."""
        if not request.model:
            request.model = _first(self.models())
        return request


def _put(request: llm_pb2.GenerateRequest, prompt: Sequence[int] | Sequence[Mapping[str, str]]) -> None:
    for part in prompt:
        if isinstance(part, int):
            request.token_ids.ids.append(part)
        else:
            request.messages.messages.add(role=part["role"], content=part["content"])


def _metadata(api_key: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {api_key}"),) if api_key else ()


def _first(models: Sequence[llm_pb2.Model]) -> str:
    if not models:
        raise LookupError("the gateway serves no model")
    return models[0].id
