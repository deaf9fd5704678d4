"""The client for threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self, TypeVar, Unpack

import grpc

from tandem_client.attempts import Attempts, Retries
from tandem_client.request import Options, Prompt, first_of, request_of
from tandem_client.service import TIMEOUT_S, LLMMethods, channel_of, metadata_of
from tandem_client.stubs.tandem.v1 import llm_pb2

T = TypeVar("T")


class Client:
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
        self._channel = channel_of(grpc, address, tls)
        self._service = LLMMethods(self._channel)
        self._api_key, self._headers = api_key, dict(headers or {})
        self._timeout_s, self._retries = timeout_s, retries or Retries()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._channel.close()

    def models(self, *, timeout_s: float | None = None, traceparent: str = "") -> list[llm_pb2.Model]:
        asked = llm_pb2.ListModelsRequest()
        call = self._call(self._service.list_models, asked, traceparent)
        return list(_tried(self._attempts(timeout_s), call).models)

    def generate(
        self, prompt: Prompt, *, timeout_s: float | None = None, traceparent: str = "", **options: Unpack[Options]
    ) -> llm_pb2.GenerateUnaryResponse:
        """The whole answer. Raises grpc.RpcError."""
        attempts = self._attempts(timeout_s)
        generate = self._named(request_of(prompt, options), attempts, traceparent)
        request = llm_pb2.GenerateUnaryRequest(generate=generate)
        answer: llm_pb2.GenerateUnaryResponse = _tried(
            attempts, self._call(self._service.generate, request, traceparent)
        )
        return answer

    def stream(
        self, prompt: Prompt, *, timeout_s: float | None = None, traceparent: str = "", **options: Unpack[Options]
    ) -> Stream:
        """Its parts as they are written. Raises grpc.RpcError."""
        attempts = self._attempts(timeout_s)
        request = self._named(request_of(prompt, options), attempts, traceparent)
        return Stream(attempts, self._call(self._service.stream, request, traceparent))

    def _attempts(self, timeout_s: float | None) -> Attempts:
        return Attempts(self._timeout_s if timeout_s is None else timeout_s, self._retries)

    def _call(self, method: Any, request: Any, traceparent: str) -> Callable[[float], Any]:
        metadata = metadata_of(self._api_key, self._headers, traceparent)
        return lambda left_s: method(request, timeout=left_s, metadata=metadata)

    def _named(self, request: llm_pb2.GenerateRequest, attempts: Attempts, traceparent: str) -> llm_pb2.GenerateRequest:
        """Without a model, the first that the gateway serves."""
        if not request.model:
            call = self._call(self._service.list_models, llm_pb2.ListModelsRequest(), traceparent)
            request.model = first_of(_tried(attempts, call).models)
        return request


class Stream:
    """An answer's parts. Any thread may cancel it; leaving its `with` does."""

    def __init__(self, attempts: Attempts, call: Callable[[float], Any]) -> None:
        self._attempts, self._again = attempts, call
        self._begun = False
        self._cancelled = threading.Event()
        self._call = call(attempts.left_s())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()

    def __iter__(self) -> Iterator[llm_pb2.GenerateResponse]:
        return self

    def __next__(self) -> llm_pb2.GenerateResponse:
        while True:
            try:
                part: llm_pb2.GenerateResponse = next(self._call)
            except grpc.RpcError as error:
                pause = None if self._begun else self._attempts.pause_s(error)
                if pause is None or self._cancelled.wait(pause):
                    raise
                self._call = self._again(self._attempts.left_s())
                if self._cancelled.is_set():  # while the call was made
                    self._call.cancel()
            else:
                self._begun = True
                return part

    def cancel(self) -> None:
        """Ends it here and at the workers; its reader gets CANCELLED."""
        self._cancelled.set()
        self._call.cancel()

    close = cancel


def _tried(attempts: Attempts, call: Callable[[float], Any]) -> Any:
    while True:
        try:
            return call(attempts.left_s())
        except grpc.RpcError as error:
            pause = attempts.pause_s(error)
            if pause is None:
                raise
            time.sleep(pause)
