"""gRPC servers and channels with Tandem's settings.

    server    health and reflection on; an interceptor around every call (tandem/rpc/interceptor.py)
    channel   quick reconnects
    within the cluster, both prove the cluster's secret and use TLS, if configured (tandem/security/)
    both      pings, so that a cut cable is noticed eventually; streams between gateway and workers have their own

Handlers raise `Refused(status, message)`; anything else is a bug, logged whole and answered with INTERNAL.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import grpc
from grpc import aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2

from tandem.hosts import address, resolved
from tandem.rpc.interceptor import PROOF, Interceptor
from tandem.rpc.interceptor import Refused as Refused
from tandem.security import NAME, NO_SECRET, OPEN, TLS, Security

# A health service that is SERVING from a process's start to its end; "" and the others report if it is ready.
LIVE = "live"
REFLECTION_V1 = "grpc.reflection.v1.ServerReflection"
MAX_MESSAGE_BYTES = 64 * 2**20
# Room for a prompt of three million tokens.
MAX_REQUEST_BYTES = 16 * 2**20
# The last resort, 20 s in all, as a slow peer is not dead. tandem/liveness/silence.py notices blocked peers.
# grpcio ignores keepalive_timeout_ms; a peer is lost when it leaves a ping unanswered for ping_timeout_ms.
KEEPALIVE = [
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 15_000),
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
    ("grpc.min_reconnect_backoff_ms", 5000),  # despite its name the timeout of an attempt
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),  # a machine's http_proxy would lead out of the cluster
]


@dataclass(frozen=True, slots=True)
class Servicer:
    """A service to serve: its full name, its implementation, and the generated function that adds it."""

    name: str
    implementation: Any
    add: Callable[[Any, aio.Server], None]


class Server:
    """A running gRPC server and the health it reports."""

    def __init__(
        self, server: aio.Server, interceptor: Interceptor, health_servicer: Any, names: Sequence[str]
    ) -> None:
        self._server, self._interceptor = server, interceptor
        self._health = health_servicer
        self._names = names
        self._probes: aio.Server | None = None
        self.port = 0

    async def set_serving(self, serving: bool) -> None:
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", *self._names):
            await self._health.set(name, status)

    async def add_probes(self, host: str, port: int, servicer: Servicer | None = None) -> None:
        """Reports the same health on a port of its own, which also serves `servicer`.

        Raises:
            OSError: the address cannot be bound.
        """
        self._probes = aio.server(options=SERVER_OPTIONS, interceptors=[Interceptor(NO_SECRET, time.time)])
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._probes)
        if servicer:
            servicer.add(servicer.implementation, self._probes)
        _bind(self._probes, host, port)
        await self._probes.start()

    async def stop(self, grace: float) -> None:
        """Refuses new calls, lets running calls end for `grace` seconds, then cancels them."""
        await self._health.enter_graceful_shutdown()
        await self._interceptor.turn_away()
        await self._server.stop(grace)
        if self._probes:
            await self._probes.stop(None)


async def serve(
    servicers: Sequence[Servicer],
    host: str,
    port: int,
    *,
    security: Security = OPEN,
    known_as: str = "",
    max_receive_bytes: int = MAX_REQUEST_BYTES,
    shared_port: bool = False,
    max_connections: int | None = None,
    make_server: Callable[..., aio.Server] = aio.server,
    wall: Callable[[], float] = time.time,
) -> Server:
    """Starts serving on host:port (0: a free one, see `Server.port`); not healthy until `set_serving(True)`.

    `known_as`: the host in callers' addresses, if it is not `host`: with a secret, calls to another address are
    refused. `shared_port`: other processes may listen there, too, and each gets a part of the connections.
    `max_connections`: more are refused; None: as many as the limit of open files allows.

    Raises:
        OSError: the address cannot be bound.
    """
    options = _options(max_receive_bytes, shared_port, max_connections)
    interceptor = Interceptor(security.secret, wall, NAME if security.tls else "")
    server = make_server(options=options, interceptors=[interceptor])
    health_servicer = health.aio.HealthServicer()  # type: ignore[attr-defined]
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    for servicer in servicers:
        servicer.add(servicer.implementation, server)
    names = [servicer.name for servicer in servicers]
    _add_reflection(server, (*names, health.SERVICE_NAME, reflection.SERVICE_NAME, REFLECTION_V1))
    started = Server(server, interceptor, health_servicer, names)
    started.port = _bind(server, host, port, security.tls)
    interceptor.address = address(known_as or host, started.port)
    await health_servicer.set(LIVE, health_pb2.HealthCheckResponse.SERVING)
    await started.set_serving(False)
    await server.start()
    return started


def _options(max_receive_bytes: int, shared_port: bool, max_connections: int | None) -> list[tuple[str, int]]:
    own = {"grpc.max_receive_message_length": max_receive_bytes, "grpc.so_reuseport": int(shared_port)}
    if max_connections is not None:
        own["grpc.max_allowed_incoming_connections"] = max_connections
    return list({**dict(SERVER_OPTIONS), **own}.items())


def _add_reflection(server: aio.Server, names: Sequence[str]) -> None:
    """Adds reflection as v1alpha, and as v1: the same messages under the name that newer clients ask for first."""
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
        resolved(host)  # raises for an unknown host
        raise OSError(f"cannot listen on {address(host, port)}: {error}") from None


def channel(address: str, security: Security = OPEN, wall: Callable[[], float] = time.time) -> aio.Channel:
    """Returns a channel to one process, which the caller closes.

    With a secret, each call has its own proof for this address.

    Raises:
        OSError: a certificate cannot be read.
    """
    opened = _channel(address, security)
    if not security.secret:
        return opened
    return cast(aio.Channel, _Proving(opened, lambda: (PROOF, security.secret.call_proof(address, wall()))))


class _Proving:
    """A channel whose calls carry a proof. gRPC's own interceptors would cost time for each message of a stream."""

    def __init__(self, channel: aio.Channel, proof: Callable[[], tuple[str, str]]) -> None:
        self._channel, self._proof = channel, proof
        for kind in ("unary_unary", "unary_stream", "stream_unary", "stream_stream"):
            setattr(self, kind, partial(self._callable, getattr(channel, kind)))

    def _callable(self, kind: Callable[..., Any], *about: Any, **options: Any) -> Callable[..., Any]:
        call = kind(*about, **options)
        return lambda *said, metadata=(), **given: call(*said, metadata=(*(metadata or ()), self._proof()), **given)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)

    async def __aenter__(self) -> _Proving:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close(None)


def _channel(address: str, security: Security) -> aio.Channel:
    if security.tls is None:
        return aio.insecure_channel(address, options=CHANNEL_OPTIONS)
    key, certificate, ca = _read(security.tls)
    credentials = grpc.ssl_channel_credentials(ca, key, certificate)
    name = ("grpc.ssl_target_name_override", NAME)
    return aio.secure_channel(address, credentials, options=[*CHANNEL_OPTIONS, name])


def _read(tls: TLS) -> tuple[bytes, bytes, bytes]:
    return tls.key.read_bytes(), tls.certificate.read_bytes(), tls.ca.read_bytes()


def _server_credentials(tls: TLS) -> grpc.ServerCredentials:
    """Returns credentials that admit peers with a certificate of the cluster.

    Renewed files count from the next handshake.
    """
    renewed: Any = RenewedFiles(tls)  # grpc-stubs do not declare that it may be None
    return grpc.dynamic_ssl_server_credentials(renewed.first, renewed, require_client_authentication=True)


class RenewedFiles:
    """Returns new certificates to gRPC before a handshake; None while the files are unchanged.

    gRPC frees the old certificates even if another handshake uses them: if new ones were returned each time, two peers
    that connect concurrently would crash the process with SIGSEGV (grpc 1.85).
    """

    def __init__(self, tls: TLS) -> None:
        self._tls = tls
        self._files = _read(tls)
        self.first = self._configuration()

    def __call__(self) -> grpc.ServerCertificateConfiguration | None:
        files = _read(self._tls)
        if files == self._files:
            return None
        self._files = files
        return self._configuration()

    def _configuration(self) -> grpc.ServerCertificateConfiguration:
        key, certificate, ca = self._files
        return grpc.ssl_server_certificate_configuration([(key, certificate)], ca)
