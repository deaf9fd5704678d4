"""LLMService as calls of a channel, plain or asyncio."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import grpc

from tandem_client.stubs.tandem.v1 import llm_pb2
from tandem_client.tracing import trace_headers

Metadata = tuple[tuple[str, str], ...]
TIMEOUT_S = 600.0
# An answer may be long; a gateway that is gone is noticed while nothing comes, and tried anew soon.
CHANNEL_OPTIONS: tuple[tuple[str, Any], ...] = (
    ("grpc.max_receive_message_length", 256 << 20),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 15_000),  # grpcio ignores keepalive_timeout_ms
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.enable_retries", 0),  # Attempts knows the deadline, and what a full cluster says
)


class LLMMethods:
    def __init__(self, channel: Any) -> None:
        def path(method: str) -> str:
            return f"/tandem.v1.LLMService/{method}"

        self.list_models = channel.unary_unary(
            path("ListModels"),
            request_serializer=llm_pb2.ListModelsRequest.SerializeToString,
            response_deserializer=llm_pb2.ListModelsResponse.FromString,
        )
        self.generate = channel.unary_unary(
            path("GenerateUnary"),
            request_serializer=llm_pb2.GenerateUnaryRequest.SerializeToString,
            response_deserializer=llm_pb2.GenerateUnaryResponse.FromString,
        )
        self.stream = channel.unary_stream(
            path("Generate"),
            request_serializer=llm_pb2.GenerateRequest.SerializeToString,
            response_deserializer=llm_pb2.GenerateResponse.FromString,
        )


def metadata_of(api_key: str, headers: Mapping[str, str], traceparent: str) -> Metadata:
    key = (("authorization", f"Bearer {api_key}"),) if api_key else ()
    return (*key, *headers.items(), *trace_headers(traceparent))


def channel_of(module: Any, address: str, tls: grpc.ChannelCredentials | None) -> Any:
    """`module` is grpc or grpc.aio."""
    if tls is None:
        return module.insecure_channel(address, options=CHANNEL_OPTIONS)
    return module.secure_channel(address, tls, options=CHANNEL_OPTIONS)
