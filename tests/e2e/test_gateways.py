"""Several gateway processes behind one port: clients see one gateway, which outlives each of its processes."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from grpc import aio

from tandem.local import free_ports
from tandem.security import ApiKey, Keys, Tier, digest, text_of, write_keys
from tandem.v1 import llm_pb2, llm_pb2_grpc
from tests.e2e.cluster import RunningCluster, eventually, metric, running_cluster

pytestmark = pytest.mark.long
BOUND_S = 60.0
PER_MINUTE = 6
TIERS = {"open": Tier(), "few": Tier(requests_per_minute=PER_MINUTE)}


@dataclass(frozen=True, slots=True)
class GatewayFleet:
    cluster: RunningCluster
    own: list[str]  # where each process answers alone

    def body(self, **other: Any) -> dict[str, Any]:
        return {"model": "tandem-demo", "prompt": "import ", "max_tokens": 4, "ignore_eos": True} | other

    def served(self) -> list[float]:
        """Answers so far, of each process that answers now."""
        return [metric(address, "vllm:request_success_total") for address in self.own]

    def ready(self) -> bool:
        try:
            return all(httpx.get(f"{at}/health/ready", timeout=10.0).status_code == 200 for at in self.own)
        except httpx.TransportError:
            return False


def key(tenant: str) -> dict[str, str]:
    return {"authorization": f"Bearer {text_of(f'{len(tenant):08x}', tenant)}"}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayFleet]:
    folder: Path = tmp_path_factory.mktemp("gateways")
    keys = Keys(tiers={"default": Tier(), **TIERS})
    for tier in TIERS:
        name, secret = f"{len(tier) + 1:08x}", digest(f"{tier}!")
        keys = keys.add(ApiKey(id=name, sha256=secret, tenant=tier, tier=tier, names_tenants=True))
    write_keys(folder / "keys.json", keys)
    own = two_ports()
    options = ("--engine=null", "--null-speedup=10", "--gateways=2", f"--own-http-port={own}")
    with running_cluster(folder, *options, f"--api-keys={folder / 'keys.json'}") as cluster:
        yield GatewayFleet(cluster, [f"http://127.0.0.1:{own + i}" for i in range(2)])


def two_ports() -> int:
    """The first of two that follow each other."""
    while True:
        first, second = free_ports(2)
        if second == first + 1:
            return first


def test_one_port_is_served_by_all_processes(fleet: GatewayFleet) -> None:
    before = fleet.served()

    def spread() -> bool:
        answer = httpx.post(f"{fleet.cluster.http}/v1/completions", json=fleet.body(), headers=key("open!"), timeout=60)
        assert answer.status_code == 200, answer.text
        return all(now > then for now, then in zip(fleet.served(), before, strict=True))

    eventually(spread, BOUND_S, "both processes have answered")


async def test_grpc_is_served_by_all_processes(fleet: GatewayFleet) -> None:
    before = fleet.served()
    async with asyncio.timeout(BOUND_S):
        while not all(now > then for now, then in zip(fleet.served(), before, strict=True)):
            async with aio.insecure_channel(fleet.cluster.grpc, [("grpc.use_local_subchannel_pool", 1)]) as channel:
                request = llm_pb2.GenerateUnaryRequest(
                    generate=llm_pb2.GenerateRequest(
                        model="tandem-demo", prompt="import ", sampling=llm_pb2.SamplingParams(max_tokens=2)
                    )
                )
                stub: Any = llm_pb2_grpc.LLMServiceStub(channel)
                await stub.GenerateUnary(request, metadata=tuple(key("open!").items()))


def test_the_status_block_names_all(fleet: GatewayFleet) -> None:
    said = (fleet.cluster.logs.parent / "up.log").read_text(encoding="utf-8")
    assert f"{fleet.cluster.http}/v1  (2 processes)" in said
    assert "at once      512 answers, " in said
    assert all(f"{address}/metrics" in said for address in fleet.own)


def test_limits_hold_across_processes(fleet: GatewayFleet) -> None:
    answers = [
        httpx.post(f"{fleet.own[i % 2]}/v1/completions", json=fleet.body(), headers=key("few!"), timeout=60)
        for i in range(2 * PER_MINUTE)
    ]
    # A minute's allowance comes back evenly: one more on a slow machine.
    refused = [answer.status_code for answer in answers].count(429)
    assert PER_MINUTE - 1 <= refused <= PER_MINUTE
    assert {answer.status_code for answer in answers} == {200, 429}


async def test_a_killed_process_is_started_again_and_others_serve_on(fleet: GatewayFleet) -> None:
    processes = fleet.cluster.pids("gateway")
    assert len(processes) == 2
    killed = next(pid for pid in processes if listens(pid, fleet.own[0]))
    statuses: list[int | str] = []
    ended = False

    async def ask() -> None:
        while not ended:
            try:
                async with httpx.AsyncClient(timeout=BOUND_S) as client:
                    url = f"{fleet.cluster.http}/v1/completions"
                    answer = await client.post(url, json=fleet.body(max_tokens=50), headers=key("open!"))
                statuses.append(answer.status_code)
            except httpx.TransportError as error:
                statuses.append(type(error).__name__)

    callers = [asyncio.create_task(ask()) for _ in range(6)]
    try:
        await passed(lambda: len(statuses) > 12)
        os.kill(killed, signal.SIGKILL)
        at_kill = len(statuses)
        await passed(lambda: statuses[at_kill:].count(200) > 24)
        await passed(lambda: killed not in fleet.cluster.pids("gateway") and len(fleet.cluster.pids("gateway")) == 2)
        await passed(lambda: fleet.ready())
    finally:
        ended = True
        await asyncio.gather(*callers)
    # What the killed one was writing, and connections that it had not looked at: one each at most.
    failures = [status for status in statuses if status != 200]
    assert len(failures) <= len(callers), failures
    assert not any(isinstance(status, int) for status in failures), failures


async def passed(check: Any) -> None:
    async with asyncio.timeout(BOUND_S):
        while not await asyncio.to_thread(check):
            await asyncio.sleep(0.05)


def listens(pid: int, address: str) -> bool:
    port = int(address.rpartition(":")[2])
    return any(c.laddr.port == port and c.status == psutil.CONN_LISTEN for c in psutil.Process(pid).net_connections())
