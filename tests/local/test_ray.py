"""A cluster on real Ray: three raylets on this machine, services as detached actors; nodes and actors go under load.

The tests share one cluster and go in order: what each leaves behind is whole again.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
import ray
import yaml
from grpc import aio
from ray.cluster_utils import Cluster as Raylets

from tandem.engine import Engine, EngineConfig, Request, SamplingParams
from tandem.local import free_ports
from tandem.local.ray import RayLauncher, State
from tandem.v1 import llm_pb2, llm_pb2_grpc
from tests.e2e.cluster import eventually

pytestmark = pytest.mark.timeout(300)
STORE_BYTES, RESTART_S, COMMAND_S = 80 * 2**20, 60.0, 150.0
PROMPT, NUM_TOKENS = list(range(40, 90)), 24


def tandem(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tandem", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_S)


@dataclass(frozen=True)
class OnRay:
    raylets: Raylets
    file: Path
    http_port: int
    grpc_port: int

    def up(self, decode: int = 2, **pool: Any) -> subprocess.CompletedProcess[str]:
        """Start it, or change it to so many decode workers and another pool."""
        common = {"model": "demo", "resources": {"requests": {"cpu": 1}}}
        pools = [common | {"name": "prefill", "role": "prefill"}, common | {"name": "decode", "role": "decode"}]
        pools[1]["replicas"] = decode
        settings = {"dtype": "float32", "transports": ["shm"], "num_blocks": 256, "threads": 1}
        cluster = {
            "models": [{"id": "demo", "name": "tandem-demo", "weights": {"path": "models/demo/target"}}],
            "workers": {"settings": settings},
            "pools": pools + ([common | pool] if pool else []),
            "gateway": {"settings": {"http_port": self.http_port, "grpc_port": self.grpc_port}},
            "redis": {"port": free_ports(1)[0]},
        }
        self.file.write_text(yaml.safe_dump(cluster))
        timeout = "--ready-timeout-s=12" if pool else "--ready-timeout-s=120"
        return tandem("up", "--ray", self.raylets.address, "--detach", "--file", str(self.file), timeout)

    def states(self) -> dict[str, State | str]:
        return asyncio.run(RayLauncher(print, detached=True).states())

    def state(self, name: str) -> State:
        state = self.states()[name]
        assert isinstance(state, State), state
        return state

    def whole(self, num_services: int = 5) -> bool:
        states = self.states().values()
        return len(states) == num_services and all(isinstance(state, State) and state.ready for state in states)

    async def load(self, during: Callable[[], object]) -> list[grpc.StatusCode]:
        """The status of each of many requests, sent while `during` runs on a thread, and for a moment longer."""
        async with aio.insecure_channel(f"127.0.0.1:{self.grpc_port}") as channel:
            service = llm_pb2_grpc.LLMServiceStub(channel)
            sent: list[asyncio.Task[grpc.StatusCode]] = []

            async def send() -> grpc.StatusCode:
                return await service.GenerateUnary(unary(100, [len(sent) + 2, *PROMPT]), timeout=60).code()

            done = asyncio.create_task(asyncio.to_thread(during))
            while not done.done() or len(sent) < 20:
                sent.append(asyncio.create_task(send()))
                await asyncio.sleep(0.25)
            await done
            return list(await asyncio.gather(*sent))

    def answer(self) -> list[int]:
        with grpc.insecure_channel(f"127.0.0.1:{self.grpc_port}") as channel:
            return list(
                llm_pb2_grpc.LLMServiceStub(channel).GenerateUnary(unary(NUM_TOKENS, PROMPT), timeout=60).token_ids
            )


def unary(max_tokens: int, token_ids: list[int]) -> llm_pb2.GenerateUnaryRequest:
    sampling = llm_pb2.SamplingParams(max_tokens=max_tokens, temperature=0, repetition_penalty=1, ignore_eos=True)
    request = llm_pb2.GenerateRequest(model="tandem-demo", token_ids=llm_pb2.TokenIds(ids=token_ids), sampling=sampling)
    return llm_pb2.GenerateUnaryRequest(generate=request)


@pytest.fixture(scope="module")
def on_ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OnRay]:
    """Two nodes that hold two services with a CPU each, and the head, which holds none of them."""
    head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": STORE_BYTES}
    raylets = Raylets(initialize_head=True, head_node_args=head)
    for _ in range(2):
        raylets.add_node(num_cpus=2, object_store_memory=STORE_BYTES)
    ray.init(raylets.address, namespace="tandem", log_to_driver=False, configure_logging=False)
    try:
        yield OnRay(raylets, tmp_path_factory.mktemp("ray") / "cluster.yaml", free_ports(1)[0], free_ports(1)[0])
    finally:
        ray.shutdown()
        raylets.shutdown()


def test_it_starts_and_stays_and_answers_as_one_engine(on_ray: OnRay, demo_model: Path) -> None:
    done = on_ray.up()
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"http://127.0.0.1:{on_ray.http_port}/v1" in done.stdout
    assert on_ray.whole()
    nodes = {name: on_ray.state(name).node for name in ("prefill-0", "decode-0", "decode-1")}
    assert nodes["prefill-0"] == nodes["decode-0"] != nodes["decode-1"]
    config = EngineConfig(model_path=demo_model, model_name="oracle", dtype="float32", num_blocks=64)
    engine = Engine(config)
    engine.add(Request("oracle", PROMPT, SamplingParams(NUM_TOKENS, temperature=0.0, ignore_eos=True)))
    expected: list[int] = []
    while engine.has_work():
        expected += [token.token_id for output in engine.step() for token in output.tokens]
    assert on_ray.answer() == expected


def test_status_shows_every_service_and_no_password(on_ray: OnRay) -> None:
    done = tandem("status", "--ray", on_ray.raylets.address)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {line.split()[0]: line for line in done.stdout.splitlines()[1:]}
    assert sorted(rows) == ["decode-0", "decode-1", "gateway", "kvstore", "prefill-0"]
    assert all(" ready " in row for row in rows.values())
    assert re.search(r"redis://:\*\*\*@\S+:\d+", rows["kvstore"])
    assert on_ray.state("decode-0").incarnation[:8] in rows["decode-0"]


async def test_a_killed_actor_comes_back_as_another_incarnation(on_ray: OnRay) -> None:
    before = await asyncio.to_thread(on_ray.state, "decode-0")
    codes = await on_ray.load(lambda: os.kill(before.pid, signal.SIGKILL))
    assert set(codes) <= {grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE}
    assert codes[-1] is grpc.StatusCode.OK
    await asyncio.to_thread(eventually, on_ray.whole, RESTART_S, "all services are ready")
    after = await asyncio.to_thread(on_ray.state, "decode-0")
    assert after.incarnation != before.incarnation


async def test_services_of_a_removed_node_come_back_on_another(on_ray: OnRay) -> None:
    lost = (await asyncio.to_thread(on_ray.state, "prefill-0")).node
    (node,) = [node for node in on_ray.raylets.list_all_nodes() if node.node_id == lost]
    on_ray.raylets.add_node(num_cpus=2, object_store_memory=STORE_BYTES)
    codes = await on_ray.load(lambda: on_ray.raylets.remove_node(node, allow_graceful=False))
    assert set(codes) <= {grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE}
    await asyncio.to_thread(eventually, on_ray.whole, RESTART_S, "all services are ready")
    assert (await asyncio.to_thread(on_ray.state, "prefill-0")).node != lost
    assert await asyncio.to_thread(on_ray.answer)


async def test_scaling_down_and_up_fails_no_request(on_ray: OnRay) -> None:
    def change() -> None:
        for decode in (1, 2):
            done = on_ray.up(decode)
            assert done.returncode == 0, done.stdout + done.stderr

    assert set(await on_ray.load(change)) == {grpc.StatusCode.OK}
    assert await asyncio.to_thread(on_ray.whole)


def test_what_cannot_be_placed_is_named_and_the_rest_serves(on_ray: OnRay) -> None:
    done = on_ray.up(name="gpu", role="decode", resources={"limits": {"nvidia.com/gpu": 1}})
    assert done.returncode == 1
    assert "gpu-0 waits for its start" in done.stdout
    assert "GPU: 1 needed, 0 free of 0" in " ".join(done.stdout.split())
    assert on_ray.answer()


def test_down_leaves_nothing(on_ray: OnRay) -> None:
    pids = [state.pid for state in on_ray.states().values() if isinstance(state, State)]
    assert len(pids) == 5
    done = tandem("down", "--ray", on_ray.raylets.address)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == "stopped decode-0, decode-1, gateway, gpu-0, kvstore, prefill-0\n"
    assert on_ray.states() == {}
    eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), 10, "every process ends")
    assert tandem("status", "--ray", on_ray.raylets.address).returncode == 1
