"""Wraps every call to a gRPC server of Tandem.

refuse     a caller without the cluster's secret, or with another service's certificate; all, once the server stops
join       the caller's trace
translate  `Refused` into its status; anything else is a bug, logged whole and answered with INTERNAL
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, cast

import grpc
import structlog
from google.protobuf.message import DecodeError
from grpc import aio
from opentelemetry import context as otel_context
from opentelemetry import propagate

from tandem.machine.garbage import let_go
from tandem.security import ClusterSecret

log = structlog.get_logger(__name__)

PROOF = "tandem-proof"  # the metadata key of a call's proof
STOPPING = grpc.StatusCode.UNAVAILABLE, "the process is stopping"
# A stopping server refuses calls until none has come for QUIET_S.
QUIET_S, TURN_AWAY_S = 0.03, 0.5


class Refused(Exception):
    """A handler's typed refusal: the status, and what a right request would be."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class Interceptor(aio.ServerInterceptor):  # type: ignore[type-arg]
    """Joins callers' traces, maps exceptions to statuses, and refuses callers without the secret all but health."""

    def __init__(self, secret: ClusterSecret, wall: Callable[[], float], peer_name: str = "") -> None:
        """`peer_name`: the name that callers' certificates must have; empty: callers need no certificate."""
        self.address = ""  # the address that callers use
        self._secret, self._wall, self._peer_name = secret, wall, peer_name
        self._turns_away = False
        self._num_calls = 0

    async def turn_away(self) -> None:
        """Refuses all calls as UNAVAILABLE from now on, and returns at a moment without calls.

        Otherwise the stop of gRPC's server would end calls that it has not handed over yet as CANCELLED, which clients
        do not retry.
        """
        self._turns_away = True
        loop = asyncio.get_running_loop()
        end, known = loop.time() + TURN_AWAY_S, -1
        while known != self._num_calls and loop.time() < end:
            known = self._num_calls
            await asyncio.sleep(QUIET_S)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        handler = cast(Any, await continuation(handler_call_details))
        if handler is not None and (wrong := self._wrong_with(handler_call_details)):
            return _refusing(handler, grpc.StatusCode.UNAUTHENTICATED, wrong)
        if handler is None or not handler_call_details.method.startswith("/tandem."):
            return cast("grpc.RpcMethodHandler[Any, Any]", handler)
        self._num_calls += 1
        if self._turns_away:
            return _refusing(handler, *STOPPING)
        carrier = {k: v for k, v in handler_call_details.invocation_metadata or () if isinstance(v, str)}
        parse, peer_name = _parsed(handler.request_deserializer), self._peer_name
        if handler.unary_unary:
            behavior = _unary(handler.unary_unary, carrier, peer_name)
            return grpc.unary_unary_rpc_method_handler(behavior, parse, handler.response_serializer)
        if handler.stream_stream:
            both_ways = _stream(_checked(handler.stream_stream), carrier, peer_name)
            return grpc.stream_stream_rpc_method_handler(both_ways, parse, handler.response_serializer)
        return grpc.unary_stream_rpc_method_handler(
            _stream(handler.unary_stream, carrier, peer_name), parse, handler.response_serializer
        )

    def _wrong_with(self, call: grpc.HandlerCallDetails) -> str:
        if not self._secret or call.method.startswith("/grpc.health."):
            return ""
        proof = next((str(v) for k, v in call.invocation_metadata or () if k == PROOF), "")
        return self._secret.wrong_with(proof, self.address, self._wall())


def _refusing(handler: Any, code: grpc.StatusCode, message: str) -> grpc.RpcMethodHandler[Any, Any]:
    """Returns a handler that refuses in place of `handler`, without parsing the request."""

    async def refuse(request: Any, context: aio.ServicerContext[Any, Any]) -> Any:
        await context.abort(code, message)

    async def refuse_stream(request: Any, context: aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
        yield await refuse(request, context)

    if handler.request_streaming:
        return grpc.stream_stream_rpc_method_handler(refuse_stream)
    if handler.response_streaming:
        return grpc.unary_stream_rpc_method_handler(refuse_stream)
    return grpc.unary_unary_rpc_method_handler(refuse)


class _Malformed:
    """Stands for a request that cannot be parsed. gRPC itself would answer UNKNOWN, or INTERNAL."""


def _parsed(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def parse(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError:
            return _Malformed()

    return parse


def _check(request: Any) -> None:
    if isinstance(request, _Malformed):
        raise Refused(grpc.StatusCode.INVALID_ARGUMENT, "the request is not a message of the kind that this call takes")


def _checked(behavior: Callable[..., AsyncIterator[Any]]) -> Callable[..., AsyncIterator[Any]]:
    async def checked(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
        async for request in requests:
            _check(request)
            yield request

    return lambda requests, context: behavior(checked(requests), context)


def _check_peer(context: aio.ServicerContext[Any, Any], name: str) -> None:
    """Refuses a caller whose certificate is for another name, as a CA may sign for other services, too."""
    if name and name.encode() not in context.auth_context().get("x509_subject_alternative_name", ()):
        raise Refused(grpc.StatusCode.UNAUTHENTICATED, f"this port is for processes with a certificate for {name}")


def _unary(
    behavior: Callable[..., Awaitable[Any]], carrier: dict[str, str], peer_name: str
) -> Callable[..., Awaitable[Any]]:
    async def call(request: Any, context: aio.ServicerContext[Any, Any]) -> Any:
        otel_context.attach(propagate.extract(carrier))
        try:
            _check_peer(context, peer_name)
            _check(request)
            return await behavior(request, context)
        except Exception as error:
            del request  # gRPC keeps what `abort` raises, and so this frame
            await _abort(error, context)

    return call


def _stream(
    behavior: Callable[..., AsyncIterator[Any]], carrier: dict[str, str], peer_name: str
) -> Callable[..., AsyncIterator[Any]]:
    async def call(request: Any, context: aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
        otel_context.attach(propagate.extract(carrier))
        try:
            _check_peer(context, peer_name)
            _check(request)
            async for response in behavior(request, context):
                yield response
        except Exception as error:
            del request  # gRPC keeps what `abort` raises, and so this frame
            await _abort(error, context)

    return call


async def _abort(error: Exception, context: aio.ServicerContext[Any, Any]) -> None:
    if isinstance(error, aio.AbortError):
        raise error
    code, message = grpc.StatusCode.INTERNAL, "internal error; the log tells more"
    if isinstance(error, Refused):
        code, message = error.code, error.message
    else:
        log.error("handler failed", exc_info=error)
    let_go(error)
    await context.abort(code, message)
