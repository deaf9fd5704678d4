"""Hosts as operators write them, for every kind of listener."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.gateway import GatewaySettings
from services.gateway.door import HttpServer
from tandem import rpc
from tandem.cluster import Cluster
from tandem.commands.up.plan import ClusterPlan
from tandem.hosts import bare, is_loopback, reached_from_here, resolved
from tandem.local import check_free, free_ports
from tandem.registry import RedisAddress
from tandem.security import check_exposed
from tandem.transfer import SocketNetwork
from tests.machines import needs_ipv6

NO_HOST = r"^--host: 'no\.such\.host\.invalid' is no address, and no name that is known here: "
HOSTS = ["127.0.0.1", "0.0.0.0", "localhost", *(pytest.param(host, marks=needs_ipv6) for host in ("::1", "::"))]


@pytest.mark.parametrize(
    ("written", "read"),
    [("[::1]", "::1"), ("[::]", "::"), ("0:0:0:0:0:0:0:1", "::1"), ("::0", "::"), ("localhost", "localhost"), ("", "")],
)
def test_an_address_is_read_with_brackets_or_without(written: str, read: str) -> None:
    assert bare(written) == read
    assert GatewaySettings(host=written, advertise_host=written, insecure=True).host == read
    told = GatewaySettings(host="::1", advertise_host=written, insecure=True).reachable_host("here")
    assert told == (read or "::1")


@pytest.mark.parametrize(("host", "own"), [("localhost", True), ("::1", True), ("127.0.0.9", True), ("::", False)])
def test_what_only_this_machine_reaches_needs_no_keys(host: str, own: bool) -> None:
    assert is_loopback(host) is own
    if not own:
        with pytest.raises(ValueError, match="can be reached by others"):
            check_exposed(host, None, insecure=False)


@pytest.mark.parametrize("host", HOSTS)
async def test_grpc_answers_where_it_listens(host: str) -> None:
    server = await rpc.serve([], host, 0)
    try:
        async with rpc.channel(rpc.address(reached_from_here(host), server.port)) as channel:
            asked = health_pb2.HealthCheckRequest(service=rpc.LIVE)
            answer = await health_pb2_grpc.HealthStub(channel).Check(asked, timeout=10)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    finally:
        await server.stop(0)


@pytest.mark.parametrize("host", HOSTS)
def test_kv_is_received_where_it_listens(host: str) -> None:
    network = SocketNetwork()
    listening = network.listen(host, 0)
    try:
        port = int(listening.address.rpartition(":")[2])
        network.dial(rpc.address(reached_from_here(host), port), 5.0).close()
    finally:
        listening.close()


async def test_a_host_that_there_is_not_is_named() -> None:
    host = "no.such.host.invalid"
    with pytest.raises(OSError, match=NO_HOST):
        await rpc.serve([], host, 0)
    with pytest.raises(OSError, match=NO_HOST):
        await HttpServer(None, host, 0, False, header_timeout_s=5.0).start()
    with pytest.raises(OSError, match=NO_HOST):
        SocketNetwork().listen(host, 0)
    with pytest.raises(ValueError, match=NO_HOST):
        check_free({"--http-port": (host, free_ports(1)[0])})
    with pytest.raises(OSError, match="is no address"):
        resolved("a" * 64 + ".invalid")  # no resolver is asked for it


def test_an_address_of_another_machine_is_the_hosts_fault_and_a_taken_port_the_ports() -> None:
    (port,) = free_ports(1)
    with pytest.raises(ValueError, match=rf"^--host: cannot listen on 192\.0\.2\.1:{port}: Cannot assign requested"):
        check_free({"--http-port": ("192.0.2.1", port)})
    with socket.create_server(("127.0.0.1", port)):
        match = rf"^--http-port: cannot listen on localhost:{port}: Address already in use$"
        with pytest.raises(ValueError, match=match):
            check_free({"--http-port": ("localhost", port)})


@needs_ipv6
def test_every_address_means_those_of_ipv4_too() -> None:
    (port,) = free_ports(1)
    with socket.create_server(("127.0.0.1", port)), pytest.raises(ValueError, match=rf"on \[::\]:{port}: Address alr"):
        check_free({"--http-port": ("::", port)})


@pytest.mark.parametrize(
    ("host", "url"), [("[::1]", "[::1]:8000"), ("[::]", "[::1]:8000"), ("0.0.0.0", "127.0.0.1:8000")]
)
def test_a_cluster_says_where_its_gateway_is_reached(host: str, url: str, tmp_path: Path) -> None:
    made: dict[str, Any] = {
        "models": [{"id": "demo", "name": "demo", "weights": {"path": "models/demo/target"}}],
        "pools": [{"name": "decode", "role": "decode", "model": "demo"}],
        "gateway": {"settings": {"host": host, "http_port": 8000, "insecure": True}},
    }
    cluster = Cluster.model_validate(made)
    plan = ClusterPlan.of(cluster, "redis://here", cluster.kvstore_service(), tmp_path, {})
    assert plan.url(plan.gateways[0]) == url
    assert cluster.addresses()["--http-port"] == (bare(host), 8000)


def test_a_redis_at_an_ipv6_address_is_shown_with_brackets() -> None:
    assert str(RedisAddress.parse("redis://:secret@[::1]:6380/1")) == "[::1]:6380"
