"""Strangers: without the cluster's secret, or a certificate of its CA, nothing of a cluster answers."""

from __future__ import annotations

import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2_grpc

from tandem import rpc
from tandem.rpc.endpoints import RenewedFiles
from tandem.rpc.interceptor import PROOF
from tandem.security import NO_SECRET, OPEN, TLS, ClusterSecret, Security
from tandem.settings import load
from tandem.transfer import LinkPeer, LocalPeer, Receiver, Sender, TransferError
from tandem.v1 import prefill_pb2, prefill_pb2_grpc, worker_pb2, worker_pb2_grpc
from tandem.worker.serving import conversion
from tandem.worker.settings import WorkerSettings
from tests.authority import Authority
from tests.transfer.pair import DECODE, PREFILL, kv_cache, until

SECRET = ClusterSecret(b"only this cluster knows")
OTHER = ClusterSecret(b"another cluster's secret")


class EchoService(worker_pb2_grpc.WorkerServiceServicer, prefill_pb2_grpc.PrefillServiceServicer):
    async def ProbeLink(self, request: prefill_pb2.ProbeLinkRequest, context: Any) -> prefill_pb2.ProbeLinkResponse:
        return prefill_pb2.ProbeLinkResponse()

    async def Work(self, requests: AsyncIterator[worker_pb2.WorkRequest], context: Any) -> AsyncIterator[Any]:
        yield worker_pb2.WorkResponse(incarnation="d-1")


@pytest.fixture
async def serve() -> AsyncIterator[Callable[[Security], Awaitable[str]]]:
    servers = []

    async def start(security: Security) -> str:
        work = rpc.Servicer(
            "tandem.v1.WorkerService", EchoService(), worker_pb2_grpc.add_WorkerServiceServicer_to_server
        )
        probe = rpc.Servicer(
            "tandem.v1.PrefillService", EchoService(), prefill_pb2_grpc.add_PrefillServiceServicer_to_server
        )
        servers.append(await rpc.serve([work, probe], "127.0.0.1", 0, security=security))
        return f"127.0.0.1:{servers[-1].port}"

    yield start
    for server in servers:
        await server.stop(0)


async def answers(address: str, security: Security) -> grpc.StatusCode:
    """The answers that a process gets there to a unary call and to a stream."""
    codes = []
    async with rpc.channel(address, security) as channel:
        probe: Any = prefill_pb2_grpc.PrefillServiceStub(channel)
        worker: Any = worker_pb2_grpc.WorkerServiceStub(channel)
        for call in (
            lambda: probe.ProbeLink(prefill_pb2.ProbeLinkRequest(), timeout=5.0),
            lambda: worker.Work(timeout=5.0).read(),
        ):
            try:
                await call()
                codes.append(grpc.StatusCode.OK)
            except aio.AioRpcError as error:
                codes.append(error.code())
    assert codes[0] is codes[1]
    return codes[0]


@pytest.mark.parametrize("stranger", [NO_SECRET, OTHER])
async def test_calls_without_the_secret_are_refused(
    serve: Callable[[Security], Awaitable[str]], stranger: ClusterSecret
) -> None:
    address = await serve(Security(SECRET))
    assert await answers(address, Security(SECRET)) is grpc.StatusCode.OK
    assert await answers(address, Security(stranger)) is grpc.StatusCode.UNAUTHENTICATED
    async with rpc.channel(address, Security(stranger)) as channel:
        health = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=rpc.LIVE))
        assert health.status == health_pb2.HealthCheckResponse.SERVING
        # Nothing is asked: grpc calls it an internal error where the refusal comes while a question is being sent.
        assert await reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo().code() is (
            grpc.StatusCode.UNAUTHENTICATED
        )


class Overhears(aio.ServerInterceptor):  # type: ignore[type-arg]
    """A stranger's server that keeps what callers say of themselves."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, str]] = []

    async def intercept_service(self, continuation: Any, details: grpc.HandlerCallDetails) -> Any:
        self.heard += [(str(k), str(v)) for k, v in details.invocation_metadata or () if k != "user-agent"]
        return await continuation(details)


@pytest.fixture
async def overheard() -> AsyncIterator[tuple[str, Overhears]]:
    """The address of an eavesdropper that has registered as a worker."""
    overhears = Overhears()
    server = aio.server(interceptors=[overhears])
    prefill_pb2_grpc.add_PrefillServiceServicer_to_server(EchoService(), server)
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(EchoService(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}", overhears
    await server.stop(0)


async def says(address: str, metadata: list[tuple[str, str]]) -> aio.AioRpcError | None:
    async with rpc.channel(address) as channel:
        stub: Any = prefill_pb2_grpc.PrefillServiceStub(channel)
        try:
            await stub.ProbeLink(prefill_pb2.ProbeLinkRequest(), metadata=metadata, timeout=5.0)
        except aio.AioRpcError as error:
            return error
    return None


async def test_what_a_stranger_was_told_opens_no_other_door(
    serve: Callable[[Security], Awaitable[str]], overheard: tuple[str, Overhears]
) -> None:
    victim, (trap, overhears) = await serve(Security(SECRET)), overheard
    assert await answers(trap, Security(SECRET)) is grpc.StatusCode.OK
    assert overhears.heard
    refused = await says(victim, overhears.heard)
    assert refused is not None
    assert refused.code() is grpc.StatusCode.UNAUTHENTICATED
    assert refused.details() == f"the call is for {trap}, and this is {victim}"
    assert SECRET.proof("call") not in str(overhears.heard)


@pytest.mark.parametrize(("ago", "welcome"), [(0, True), (100, True), (-100, True), (140, False), (-140, False)])
async def test_what_was_overheard_opens_a_door_for_two_minutes(
    serve: Callable[[Security], Awaitable[str]], ago: float, welcome: bool
) -> None:
    """So far may the clocks of two hosts be apart."""
    address = await serve(Security(SECRET))
    refused = await says(address, [(PROOF, SECRET.call_proof(address, time.time() - ago))])
    assert (refused is None) is welcome
    if refused:
        assert "s off: more than 120" in (refused.details() or "")


async def test_a_channel_of_any_age_opens_new_streams(serve: Callable[[Security], Awaitable[str]]) -> None:
    """As one that has reconnected after hours does."""
    address, now = await serve(Security(SECRET)), [time.time() - 10_000]
    async with rpc.channel(address, Security(SECRET), lambda: now[0]) as channel:
        stub: Any = worker_pb2_grpc.WorkerServiceStub(channel)
        with pytest.raises(aio.AioRpcError, match="off"):
            await stub.Work(timeout=5.0).read()
        now[0] = time.time()
        assert (await stub.Work(timeout=5.0).read()).incarnation == "d-1"


@pytest.mark.parametrize("proof", ["", " ", "x", "1 2", "a b c", " x ", "1 " + "y" * 5000 + " z"])
async def test_no_proof_breaks_a_server(serve: Callable[[Security], Awaitable[str]], proof: str) -> None:
    refused = await says(await serve(Security(SECRET)), [(PROOF, proof)])
    assert refused is not None
    assert refused.code() is grpc.StatusCode.UNAUTHENTICATED


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls") / "ours")


async def test_certificates_of_the_cluster_are_asked_for_on_both_sides(
    serve: Callable[[Security], Awaitable[str]], authority: Authority, tmp_path: Path
) -> None:
    ours, theirs = authority.issue("worker"), Authority(tmp_path / "theirs").issue("worker")
    address = await serve(Security(SECRET, ours))
    assert await answers(address, Security(SECRET, authority.issue("gateway"))) is grpc.StatusCode.OK
    stranger = TLS(theirs.certificate, theirs.key, ours.ca)
    for refused in (OPEN, Security(SECRET), Security(SECRET, stranger), Security(SECRET, theirs)):
        assert await answers(address, refused) is grpc.StatusCode.UNAVAILABLE
    assert await answers(address, Security(OTHER, ours)) is grpc.StatusCode.UNAUTHENTICATED
    impostor = await serve(Security(SECRET, authority.issue("impostor", to="elsewhere.tandem")))
    assert await answers(impostor, Security(SECRET, ours)) is grpc.StatusCode.UNAVAILABLE


async def test_a_certificate_for_another_service_is_refused(
    serve: Callable[[Security], Awaitable[str]], authority: Authority
) -> None:
    """One CA signs for many services: theirs are no processes of the cluster."""
    address = await serve(Security(tls=authority.issue("worker")))
    other = authority.issue("metrics", to="metrics.example")
    assert await answers(address, Security(tls=other)) is grpc.StatusCode.UNAUTHENTICATED
    assert await answers(address, Security(tls=authority.issue("gateway"))) is grpc.StatusCode.OK
    async with rpc.channel(address, Security(tls=other)) as channel:
        health = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=rpc.LIVE))
        assert health.status == health_pb2.HealthCheckResponse.SERVING


async def test_renewed_certificates_count_without_a_restart(
    serve: Callable[[Security], Awaitable[str]], authority: Authority, tmp_path: Path
) -> None:
    """Another CA's in the place of the old ones: only who has those is let in from then on."""
    ours, theirs = authority.issue("worker"), Authority(tmp_path / "theirs").issue("worker")
    files = TLS(*(tmp_path / name for name in ("certificate", "key", "ca")))

    def put(tls: TLS) -> None:
        for name in ("certificate", "key", "ca"):
            getattr(files, name).write_bytes(getattr(tls, name).read_bytes())

    put(ours)
    address = await serve(Security(tls=files))
    assert await answers(address, Security(tls=ours)) is grpc.StatusCode.OK
    put(theirs)
    assert await answers(address, Security(tls=theirs)) is grpc.StatusCode.OK
    assert await answers(address, Security(tls=ours)) is grpc.StatusCode.UNAVAILABLE


async def test_peers_that_connect_at_once_do_not_end_a_process(authority: Authority) -> None:
    """gRPC frees certificates that are replaced under a handshake: it gets none while the files are unchanged."""
    tls = authority.issue("worker")
    renewed = RenewedFiles(tls)
    assert [renewed() for _ in range(3)] == [None, None, None]
    tls.certificate.write_bytes(authority.issue("another").certificate.read_bytes())
    assert renewed() is not None
    assert renewed() is None


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    receiver = Receiver(LocalPeer(DECODE, SECRET), kv_cache(8), host="127.0.0.1", transports=("tcp",), max_links=4)
    yield receiver
    receiver.close()


def link(receiver: Receiver, secret: ClusterSecret, worker: LinkPeer = PREFILL) -> None:
    """Opens one, and moves a block. Raises TransferError."""
    sender = Sender(LocalPeer(worker, secret), transports=("tcp",))
    try:
        sender.open_link(DECODE, receiver.address, timeout_s=5.0).result(6.0)
    finally:
        sender.close()


@pytest.mark.parametrize("stranger", [NO_SECRET, OTHER])
def test_kv_links_of_strangers_are_refused(receiver: Receiver, stranger: ClusterSecret) -> None:
    link(receiver, SECRET)
    with pytest.raises(TransferError, match="UNAUTHENTICATED"):
        link(receiver, stranger)


def test_a_sender_trusts_no_stranger_at_a_known_address() -> None:
    stranger = Receiver(LocalPeer(DECODE), kv_cache(8), host="127.0.0.1", transports=("tcp",))
    with pytest.raises(TransferError, match="UNAUTHENTICATED: Welcome"):
        link(stranger, SECRET)
    stranger.close()


def test_silent_strangers_keep_no_worker_out(receiver: Receiver) -> None:
    host, _, port = receiver.address.rpartition(":")
    with ExitStack() as stack:
        for _ in range(8):
            stack.enter_context(socket.create_connection((host, int(port))))
        assert until(lambda: len(receiver._connections) == 4)
        link(receiver, SECRET)


def test_a_ticket_is_its_signers() -> None:
    ticket = worker_pb2.LandingTicket(transfer_id="t", transfer_address="127.0.0.1:1", num_prompt_blocks=3)
    conversion.sign(ticket, SECRET)
    assert conversion.is_signed(ticket, SECRET)
    for stranger in (OTHER, ClusterSecret(b"")):
        other = worker_pb2.LandingTicket.FromString(ticket.SerializeToString())
        conversion.sign(other, stranger)
        assert not conversion.is_signed(other, SECRET)
    ticket.transfer_address = "10.0.0.1:22"
    assert not conversion.is_signed(ticket, SECRET)


def test_settings_say_what_is_missing(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("short\n", encoding="utf-8")
    settings = load(WorkerSettings, ["--model-path=x", f"--cluster-secret={secret}"], "worker")
    with pytest.raises(ValueError, match="at least 16 bytes, got 5"):
        _ = settings.security
    secret.write_text("long enough for a cluster\n", encoding="utf-8")
    settings = load(WorkerSettings, ["--model-path=x", f"--cluster-secret={secret}"], "worker")
    assert settings.security.secret.proves(ClusterSecret(b"long enough for a cluster").proof("x"), "x")
