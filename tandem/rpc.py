"""gRPC the way every Tandem process uses it.

    server    health and reflection on; one interceptor that joins the caller's trace and turns exceptions into statuses
    channel   quick reconnects
    within the cluster, both prove the cluster's secret and speak TLS where there is one (tandem/security.py)
    both      pings, so that a peer that stands still (SIGSTOP, a cut cable) is noticed within two seconds

Handlers raise `Refused(status, message)`; anything else is a bug, logged whole and answered with INTERNAL.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from hmac import compare_digest
from typing import Any, cast

import grpc
import structlog
from google.protobuf.message import DecodeError
from grpc import aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2
from opentelemetry import context as otel_context
from opentelemetry import propagate

from tandem.security import NAME, NO_SECRET, OPEN, TLS, ClusterSecret, Security

log = structlog.get_logger(__name__)

# A health service that is SERVING from a process's start to its end; "" and the others say whether it is ready.
LIVE = "live"
REFLECTION_V1 = "grpc.reflection.v1.ServerReflection"
MAX_MESSAGE_BYTES = 64 * 2**20
# A prompt of three million tokens.
MAX_REQUEST_BYTES = 16 * 2**20
# grpcio ignores keepalive_timeout_ms; a peer is lost when it leaves a ping unanswered for ping_timeout_ms.
PING_TIMEOUT_MS = 900
KEEPALIVE = [
    ("grpc.keepalive_time_ms", 500),
    ("grpc.http2.ping_timeout_ms", PING_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]
LIMITS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
]
SERVER_OPTIONS = [
    *KEEPALIVE,
    *LIMITS,
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 250),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.so_reuseport", 0),
]
CHANNEL_OPTIONS = [
    *KEEPALIVE,
    *LIMITS,
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.use_local_subchannel_pool", 1),
]


STRANGER = grpc.StatusCode.UNAUTHENTICATED, "this port is for processes with the cluster's secret"
STOPPING = grpc.StatusCode.UNAVAILABLE, "the process is stopping"
# A server that stops refuses calls until none has come for QUIET_S.
QUIET_S, TURN_AWAY_S = 0.03, 0.5


class Refused(Exception):
    """A handler's typed answer "no": the status and what would be right."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


@dataclass(frozen=True, slots=True)
class Servicer:
    """One service to serve: its full name, its implementation, and the generated function that adds it."""

    name: str
    implementation: Any
    add: Callable[[Any, aio.Server], None]


class Server:
    """A running gRPC server and the health it reports."""

    def __init__(self, server: aio.Server, edge: _Edge, health_servicer: Any, names: Sequence[str]) -> None:
        self._server, self._edge = server, edge
        self._health = health_servicer
        self._names = names
        self._probes: aio.Server | None = None
        self.port = 0

    async def set_serving(self, serving: bool) -> None:
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", *self._names):
            await self._health.set(name, status)

    async def add_probes(self, host: str, port: int, servicer: Servicer | None = None) -> None:
        """Answer for the same health on a port of its own, where `servicer` is served beside it.

        Raises:
            OSError: the address cannot be bound.
        """
        self._probes = aio.server(options=SERVER_OPTIONS, interceptors=[_Edge(NO_SECRET)])
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._probes)
        if servicer:
            servicer.add(servicer.implementation, self._probes)
        _bind(self._probes, host, port)
        await self._probes.start()

    async def stop(self, grace: float) -> None:
        """Refuse new calls, let running ones end for `grace` seconds, then cancel them."""
        await self._health.enter_graceful_shutdown()
        await self._edge.turn_away()
        await self._server.stop(grace)
        if self._probes:
            await self._probes.stop(None)


async def serve(
    servicers: Sequence[Servicer],
    host: str,
    port: int,
    *,
    security: Security = OPEN,
    max_receive_bytes: int = MAX_REQUEST_BYTES,
    ping_timeout_ms: int = PING_TIMEOUT_MS,
    shared_port: bool = False,
    make_server: Callable[..., aio.Server] = aio.server,
) -> Server:
    """Start serving on host:port (0 chooses a free one, see `Server.port`); not healthy until `set_serving(True)`.

    `shared_port`: other processes may listen there, too, and each gets a part of the connections.

    Raises:
        OSError: the address cannot be bound.
    """
    own = {
        "grpc.max_receive_message_length": max_receive_bytes,
        "grpc.http2.ping_timeout_ms": ping_timeout_ms,
        "grpc.so_reuseport": int(shared_port),
    }
    options = list({**dict(SERVER_OPTIONS), **own}.items())
    edge = _Edge(security.secret)
    server = make_server(options=options, interceptors=[edge])
    health_servicer = health.aio.HealthServicer()  # type: ignore[attr-defined]
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    for servicer in servicers:
        servicer.add(servicer.implementation, server)
    names = [servicer.name for servicer in servicers]
    _add_reflection(server, (*names, health.SERVICE_NAME, reflection.SERVICE_NAME, REFLECTION_V1))
    started = Server(server, edge, health_servicer, names)
    started.port = _bind(server, host, port, security.tls)
    await health_servicer.set(LIVE, health_pb2.HealthCheckResponse.SERVING)
    await started.set_serving(False)
    await server.start()
    return started


def _add_reflection(server: aio.Server, names: Sequence[str]) -> None:
    """v1alpha, and v1: the same messages, under a name that newer clients ask for first."""
    reflection.enable_server_reflection(names, server)
    servicer = reflection.aio.ReflectionServicer(names)  # type: ignore[attr-defined]
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        reflection_pb2.ServerReflectionRequest.FromString,
        reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    methods = {"ServerReflectionInfo": handler}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(REFLECTION_V1, methods),))


def _bind(server: aio.Server, host: str, port: int, tls: TLS | None = None) -> int:
    try:
        if tls:
            return server.add_secure_port(address(host, port), _server_credentials(tls))
        return server.add_insecure_port(address(host, port))
    except RuntimeError as error:
        raise OSError(f"cannot listen on {address(host, port)}: {error}") from None


def address(host: str, port: int) -> str:
    """host:port, an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def channel(address: str, security: Security = OPEN) -> aio.Channel:
    """A channel to one process. The caller closes it.

    Raises:
        OSError: a certificate cannot be read.
    """
    # What every call says: a header that costs nothing per call, as metadata would.
    agent = [("grpc.primary_user_agent", _agent(security.secret))] if security.secret else []
    if security.tls is None:
        return aio.insecure_channel(address, options=[*CHANNEL_OPTIONS, *agent])
    key, certificate, ca = _read(security.tls)
    credentials = grpc.ssl_channel_credentials(ca, key, certificate)
    name = ("grpc.ssl_target_name_override", NAME)
    return aio.secure_channel(address, credentials, options=[*CHANNEL_OPTIONS, *agent, name])


def _agent(secret: ClusterSecret) -> str:
    return f"tandem/{secret.proof('rpc')}"


def _read(tls: TLS) -> tuple[bytes, bytes, bytes]:
    return tls.key.read_bytes(), tls.certificate.read_bytes(), tls.ca.read_bytes()


def _server_credentials(tls: TLS) -> grpc.ServerCredentials:
    """For peers with a certificate of the cluster, read anew for each of them."""

    def configuration() -> grpc.ServerCertificateConfiguration:
        key, certificate, ca = _read(tls)
        return grpc.ssl_server_certificate_configuration([(key, certificate)], ca)

    first = configuration()
    return grpc.dynamic_ssl_server_credentials(first, configuration, require_client_authentication=True)


class _Edge(aio.ServerInterceptor):  # type: ignore[type-arg]
    """Joins the caller's trace; maps exceptions to statuses; refuses all but health to those without the secret."""

    def __init__(self, secret: ClusterSecret) -> None:
        self._agent = _agent(secret) if secret else ""
        self._turns_away = False
        self._num_calls = 0

    async def turn_away(self) -> None:
        """From now on a call is UNAVAILABLE. Returns in a moment without calls: when a server stops, gRPC ends those
        that it has received and not handed over as CANCELLED, which no client takes for a reason to try again."""
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
        if handler is not None and not self._admits(handler_call_details):
            return _refusing(handler, *STRANGER)
        if handler is None or not handler_call_details.method.startswith("/tandem."):
            return cast("grpc.RpcMethodHandler[Any, Any]", handler)
        self._num_calls += 1
        if self._turns_away:
            return _refusing(handler, *STOPPING)
        carrier = {k: v for k, v in handler_call_details.invocation_metadata or () if isinstance(v, str)}
        parse = _parsed(handler.request_deserializer)
        if handler.unary_unary:
            behavior = _unary(handler.unary_unary, carrier)
            return grpc.unary_unary_rpc_method_handler(behavior, parse, handler.response_serializer)
        if handler.stream_stream:
            both_ways = _stream(_checked(handler.stream_stream), carrier)
            return grpc.stream_stream_rpc_method_handler(both_ways, parse, handler.response_serializer)
        return grpc.unary_stream_rpc_method_handler(
            _stream(handler.unary_stream, carrier), parse, handler.response_serializer
        )

    def _admits(self, call: grpc.HandlerCallDetails) -> bool:
        if not self._agent or call.method.startswith("/grpc.health."):
            return True
        said = next((str(v) for k, v in call.invocation_metadata or () if k == "user-agent"), "")
        return compare_digest(said.partition(" ")[0].encode(), self._agent.encode())


def _refusing(handler: Any, code: grpc.StatusCode, message: str) -> grpc.RpcMethodHandler[Any, Any]:
    """In the place of `handler`; what was sent is not even parsed."""

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
    """In the place of a request that is no message of its kind. gRPC itself would answer UNKNOWN, or INTERNAL."""


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


def _unary(behavior: Callable[..., Awaitable[Any]], carrier: dict[str, str]) -> Callable[..., Awaitable[Any]]:
    async def call(request: Any, context: aio.ServicerContext[Any, Any]) -> Any:
        otel_context.attach(propagate.extract(carrier))
        try:
            _check(request)
            return await behavior(request, context)
        except Exception as error:
            await _abort(error, context)

    return call


def _stream(behavior: Callable[..., AsyncIterator[Any]], carrier: dict[str, str]) -> Callable[..., AsyncIterator[Any]]:
    async def call(request: Any, context: aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
        otel_context.attach(propagate.extract(carrier))
        try:
            _check(request)
            async for response in behavior(request, context):
                yield response
        except Exception as error:
            await _abort(error, context)

    return call


async def _abort(error: Exception, context: aio.ServicerContext[Any, Any]) -> None:
    if isinstance(error, aio.AbortError):
        raise error
    if isinstance(error, Refused):
        await context.abort(error.code, error.message)
    log.error("handler failed", exc_info=error)
    await context.abort(grpc.StatusCode.INTERNAL, "internal error; the log tells more")
