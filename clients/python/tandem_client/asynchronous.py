"""The client for asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, Self, Unpack

import grpc
from grpc import aio

from tandem_client.attempts import Attempts, Retries
from tandem_client.request import Options, Prompt, first_of, request_of
from tandem_client.service import TIMEOUT_S, LLMMethods, channel_of, metadata_of
from tandem_client.stubs.tandem.v1 import llm_pb2


class AsyncClient:
    def __init__(
        self,
        address: str,
        api_key: str = "",
        timeout_s: float = TIMEOUT_S,
        retries: Retries | None = None,
        tls: grpc.ChannelCredentials | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """`timeout_s` bounds each call that names no time of its own; `headers` are metadata of each."""
        self._channel = channel_of(aio, address, tls)
        self._service = LLMMethods(self._channel)
        self._api_key, self._headers = api_key, dict(headers or {})
        self._timeout_s, self._retries = timeout_s, retries or Retries()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._channel.close(None)

    async def models(self, *, timeout_s: float | None = None, traceparent: str = "") -> list[llm_pb2.Model]:
        return await self._models(self._attempts(timeout_s), traceparent)

    async def generate(
        self, prompt: Prompt, *, timeout_s: float | None = None, traceparent: str = "", **options: Unpack[Options]
    ) -> llm_pb2.GenerateUnaryResponse:
        """The whole answer; the task's cancellation ends it at the workers, too. Raises grpc.aio.AioRpcError."""
        attempts = self._attempts(timeout_s)
        generate = await self._named(request_of(prompt, options), attempts, traceparent)
        request = llm_pb2.GenerateUnaryRequest(generate=generate)
        call = self._call(self._service.generate, request, traceparent)
        answer: llm_pb2.GenerateUnaryResponse = await _tried(attempts, call)
        return answer

    def stream(
        self, prompt: Prompt, *, timeout_s: float | None = None, traceparent: str = "", **options: Unpack[Options]
    ) -> AsyncStream:
        """Its parts as they are written. Raises grpc.aio.AioRpcError."""
        attempts = self._attempts(timeout_s)
        request = request_of(prompt, options)

        async def begun() -> Callable[[float], Any]:
            return self._call(self._service.stream, await self._named(request, attempts, traceparent), traceparent)

        return AsyncStream(attempts, begun)

    def _attempts(self, timeout_s: float | None) -> Attempts:
        return Attempts(self._timeout_s if timeout_s is None else timeout_s, self._retries)

    def _call(self, method: Any, request: Any, traceparent: str) -> Callable[[float], Any]:
        metadata = metadata_of(self._api_key, self._headers, traceparent)
        return lambda left_s: method(request, timeout=left_s, metadata=metadata)

    async def _models(self, attempts: Attempts, traceparent: str) -> list[llm_pb2.Model]:
        call = self._call(self._service.list_models, llm_pb2.ListModelsRequest(), traceparent)
        return list((await _tried(attempts, call)).models)

    async def _named(
        self, request: llm_pb2.GenerateRequest, attempts: Attempts, traceparent: str
    ) -> llm_pb2.GenerateRequest:
        """Without a model, the first that the gateway serves."""
        if not request.model:
            request.model = first_of(await self._models(attempts, traceparent))
        return request


class AsyncStream:
    """An answer's parts. Any task may cancel it; leaving its `async with` does."""

    def __init__(self, attempts: Attempts, begin: Callable[[], Any]) -> None:
        self._attempts, self._begin = attempts, begin
        self._again: Callable[[float], Any] | None = None
        self._call: Any = None
        self._begun = False
        self._cancelled = asyncio.Event()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cancel()

    def __aiter__(self) -> AsyncIterator[llm_pb2.GenerateResponse]:
        return self

    async def __anext__(self) -> llm_pb2.GenerateResponse:
        while True:
            if self._call is None:
                self._again = self._again or await self._begin()
                self._call = self._again(self._attempts.left_s())
            if self._cancelled.is_set():
                self._call.cancel()
            try:
                part: llm_pb2.GenerateResponse = await self._call.__aiter__().__anext__()
            except grpc.RpcError as error:
                pause = None if self._begun else self._attempts.pause_s(error)
                if pause is None or await self._cancelled_within(pause):
                    raise
                self._call = None
            else:
                self._begun = True
                return part

    def cancel(self) -> None:
        """Ends it here and at the workers; its reader gets asyncio.CancelledError."""
        self._cancelled.set()
        if self._call is not None:
            self._call.cancel()

    async def aclose(self) -> None:
        self.cancel()

    async def _cancelled_within(self, seconds: float) -> bool:
        try:
            await asyncio.wait_for(self._cancelled.wait(), seconds)
        except TimeoutError:
            return False
        return True


async def _tried(attempts: Attempts, call: Callable[[float], Any]) -> Any:
    while True:
        try:
            return await call(attempts.left_s())
        except grpc.RpcError as error:
            pause = attempts.pause_s(error)
            if pause is None:
                raise
            await asyncio.sleep(pause)
