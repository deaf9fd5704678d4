"""A cluster on real Ray: three raylets on this machine, services as detached actors; each part goes under load.

The tests share one cluster, which is made whole again before each of them.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import ray
import yaml
from grpc import aio
from ray.cluster_utils import Cluster as Raylets

from tandem.commands.clusters.detached import down, status
from tandem.engine import Engine, EngineConfig, Request, SamplingParams
from tandem.local import RedisServer, free_ports
from tandem.local.ray import ActorState, RayLauncher
from tandem.v1 import llm_pb2, llm_pb2_grpc
from tests.e2e.cluster import eventually

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]
NODE = {"object_store_memory": 80 * 2**20, "include_log_monitor": False}
RESTART_S, COMMAND_S, HEADLESS_S, CRASH_S, DOWN_S = 60.0, 150.0, 2.0, 5.0, 100.0
# Else each raylet starts a worker a CPU for each driver that connects.
NO_SPARE_WORKERS = {"prestart_worker_first_driver": False, "enable_worker_prestart": False}
WORKERS = ("decode-0", "decode-1", "prefill-0", "prefill-1")
SERVICES = sorted([*WORKERS, "gateway-0", "gateway-1", "kvstore"])
PROMPT, NUM_TOKENS, AT_ONCE = list(range(40, 90)), 24, 6


@dataclass(frozen=True)
class OnRay:
    raylets: Raylets
    folder: Path  # holds models/target, which Ray brings to the services
    http_port: int
    grpc_port: int

    @property
    def options(self) -> list[str]:
        return [f"--ray={self.raylets.address}"]

    def up(
        self, decode: int = 2, settings: dict[str, Any] | None = None, **pool: Any
    ) -> subprocess.CompletedProcess[str]:
        """Start it, or change it to so many decode workers, other settings of workers and another pool."""
        common = {"model": "demo", "replicas": 2, "resources": {"requests": {"cpu": 1}}}
        pools = [common | {"name": "prefill", "role": "prefill"}, common | {"name": "decode", "role": "decode"}]
        pools[1]["replicas"] = decode
        settings = {"dtype": "float32", "transports": ["shm"], "num_blocks": 256, "threads": 1} | (settings or {})
        gateway = {
            "host": "0.0.0.0",
            "insecure": True,
            "http_port": self.http_port,
            "grpc_port": self.grpc_port,
        }
        cluster = {
            "models": [{"id": "demo", "name": "tandem-demo", "weights": {"kind": "runtime_env", "path": "target"}}],
            "ray": {"runtime_env": {"working_dir": str(self.folder / "models")}},
            "workers": {"settings": settings},
            "pools": pools + ([common | {"replicas": 1} | pool] if pool else []),
            "gateway": {"replicas": 2, "settings": gateway},
            "redis": {"port": free_ports(1)[0]},
        }
        (file := self.folder / "cluster.yaml").write_text(yaml.safe_dump(cluster), encoding="utf-8")
        timeout = f"--ready-timeout-s={12 if pool else 120}"
        command = [sys.executable, "-m", "tandem", "up", *self.options, "--detach", f"--file={file}", timeout]
        return subprocess.run(command, capture_output=True, encoding="utf-8", timeout=COMMAND_S)

    def states(self) -> dict[str, ActorState | str]:
        return asyncio.run(RayLauncher(print, detached=True).states())

    def state(self, name: str) -> ActorState:
        state = self.states()[name]
        assert isinstance(state, ActorState), state
        return state

    def whole(self, services: Collection[str] = SERVICES) -> bool:
        states = self.states()
        return sorted(states) == sorted(services) and all(
            isinstance(state, ActorState) and state.ready for state in states.values()
        )

    def make_whole(self) -> None:
        """Two nodes that hold two workers each, beside the head, and every service."""
        (self.folder / "away").exists() and (self.folder / "away").rename(self.folder / "models")
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")}
        for _ in range(2 - len(alive)):
            self.raylets.add_node(num_cpus=2, **NODE)
        if not self.whole():
            done = self.up()
            assert done.returncode == 0, done.stdout + done.stderr

    def kill_raylet(self, node_id: str) -> None:
        """Its machine is gone: everything of it ends at once."""
        (node,) = [node for node in self.raylets.list_all_nodes() if node.node_id == node_id]
        self.raylets.remove_node(node, allow_graceful=False)

    async def load(self, during: Coroutine[Any, Any, object]) -> list[grpc.StatusCode]:
        """The status of each of many requests, sent while `during` runs, and for a moment longer."""
        async with aio.insecure_channel(f"127.0.0.1:{self.grpc_port}") as channel:
            service = llm_pb2_grpc.LLMServiceStub(channel)
            sent: list[asyncio.Task[grpc.StatusCode]] = []

            async def send() -> grpc.StatusCode:
                return await service.GenerateUnary(unary(60, [len(sent) + 2, *PROMPT]), timeout=60).code()

            done = asyncio.create_task(during)
            while not done.done() or len(sent) < 12:
                if sum(not task.done() for task in sent) < AT_ONCE:  # a slow machine is not overloaded besides
                    sent.append(asyncio.create_task(send()))
                await asyncio.sleep(0.3)
            await done
            return list(await asyncio.gather(*sent))

    def answer(self) -> list[int]:
        with grpc.insecure_channel(f"127.0.0.1:{self.grpc_port}") as channel:
            return list(
                llm_pb2_grpc.LLMServiceStub(channel).GenerateUnary(unary(NUM_TOKENS, PROMPT), timeout=60).token_ids
            )


async def keep_head_running(head: Any) -> None:
    """As a machine's supervisor does: now and then Ray's head crashes as it starts, while its nodes connect to it, and
    is gone CRASH_S later. On this thread: its process dies with the thread that started it."""
    for _ in range(5):
        head.start_gcs_server()
        await asyncio.sleep(CRASH_S)
        if "gcs_server" in (kind for kind, _ in head.live_processes()):
            return
        head.kill_gcs_server(check_alive=False)
    raise AssertionError("Ray's head does not start")


def unary(max_tokens: int, token_ids: list[int]) -> llm_pb2.GenerateUnaryRequest:
    sampling = llm_pb2.SamplingParams(max_tokens=max_tokens, temperature=0, repetition_penalty=1, ignore_eos=True)
    request = llm_pb2.GenerateRequest(model="tandem-demo", token_ids=llm_pb2.TokenIds(ids=token_ids), sampling=sampling)
    return llm_pb2.GenerateUnaryRequest(generate=request)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, demo_model: Path) -> Iterator[OnRay]:
    """The head, which holds no worker and whose memory is a Redis; nodes come as they are needed."""
    folder = tmp_path_factory.mktemp("ray")
    shutil.copytree(demo_model, folder / "models" / "target")
    head = {"num_cpus": 0, "include_dashboard": False, "no_monitor": True, "_system_config": NO_SPARE_WORKERS}
    with RedisServer.start() as redis, pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_REDIS_ADDRESS", f"{redis.host}:{redis.port}")
        raylets = Raylets(initialize_head=True, head_node_args=head | NODE)
        patch.undo()
        ray.init(raylets.address, namespace="tandem", log_to_driver=False, configure_logging=False)
        try:
            yield OnRay(raylets, folder, *consecutive_ports())
        finally:
            ray.shutdown()
            raylets.shutdown()


@pytest.fixture
def on_ray(shared: OnRay) -> OnRay:
    shared.make_whole()
    return shared


def consecutive_ports() -> tuple[int, int]:
    """Two of the first gateway: those of the second count up from there."""
    while True:
        http, next_http, grpc_port, next_grpc = free_ports(4)
        if (next_http, next_grpc) == (http + 1, grpc_port + 1):
            return http, grpc_port


def test_it_starts_and_stays_and_answers_as_one_engine(on_ray: OnRay, demo_model: Path) -> None:
    done = on_ray.up()
    assert done.returncode == 0, done.stdout + done.stderr
    assert f":{on_ray.http_port}/v1" in done.stdout
    assert f":{on_ray.http_port + 1}/v1" in done.stdout
    assert on_ray.whole()
    config = EngineConfig(model_path=demo_model, model_name="oracle", dtype="float32", num_blocks=64)
    engine = Engine(config)
    engine.add(Request("oracle", PROMPT, SamplingParams(NUM_TOKENS, temperature=0.0, ignore_eos=True)))
    expected: list[int] = []
    while engine.has_work():
        expected += [token.token_id for output in engine.step() for token in output.tokens]
    assert on_ray.answer() == expected


def test_roles_and_gateways_are_spread_over_the_nodes(on_ray: OnRay) -> None:
    """Pairs whose KV stays on a machine are on one, and no machine has both of a role."""
    down(on_ray.options)
    on_ray.make_whole()
    nodes = {name: on_ray.state(name).node for name in SERVICES}
    assert nodes["prefill-0"] == nodes["decode-0"]
    assert nodes["prefill-1"] == nodes["decode-1"]
    assert len({nodes["decode-0"], nodes["decode-1"], nodes["gateway-0"]}) == 3
    assert nodes["gateway-1"] != nodes["gateway-0"] == nodes["kvstore"]


def test_status_shows_every_service_where_clients_go_and_no_password(
    on_ray: OnRay, capsys: pytest.CaptureFixture[str]
) -> None:
    status(on_ray.options)
    _, *lines, first, second = capsys.readouterr().out.splitlines()
    ports = [re.findall(r":(\d+)", line) for line in sorted([first, second])]
    assert ports == [[str(on_ray.http_port + n), str(on_ray.grpc_port + n)] for n in range(2)]
    rows = {line.split()[0]: line for line in lines}
    assert sorted(rows) == SERVICES
    assert all(" ready " in row for row in rows.values())
    assert re.search(r"redis://:\*\*\*@\S+:\d+", rows["kvstore"])
    assert on_ray.state("decode-0").incarnation[:8] in rows["decode-0"]


def test_prometheus_finds_and_reads_every_process(on_ray: OnRay) -> None:
    found = httpx.get(f"http://127.0.0.1:{on_ray.http_port}/metrics/targets", timeout=60.0).json()
    pages = {
        one["labels"].get("worker", one["labels"]["component"]): httpx.get(
            f"http://{target}/metrics", timeout=60.0
        ).text
        for one in found
        for target in one["targets"]
    }
    assert sorted(pages) == sorted([*WORKERS, "gateway", "kvstore"])
    assert "tandem_registry_workers 4.0" in pages["kvstore"]
    assert 'vllm:generation_tokens_total{model_name="tandem-demo"}' in pages["gateway"]
    for worker in WORKERS:
        labels = f'{{model_name="tandem-demo",role="{worker[:-2]}",worker="{worker}"}}'
        assert f"tandem_kv_blocks{labels} 256.0" in pages[worker]


def test_what_clients_want_kept_is_kept(on_ray: OnRay) -> None:
    url = f"http://127.0.0.1:{on_ray.http_port}/v1/responses"
    asked = {"model": "tandem-demo", "input": "import os", "max_output_tokens": 4}
    response = httpx.post(url, json=asked, timeout=60.0).json()
    assert response["store"] is True
    assert httpx.get(f"{url}/{response['id']}", timeout=60.0).json() == response


async def test_requests_go_on_while_the_head_is_gone_and_it_comes_back_knowing_all(on_ray: OnRay) -> None:
    before = await asyncio.to_thread(on_ray.states)

    async def restart_head() -> None:
        head = on_ray.raylets.head_node
        head.kill_gcs_server()
        await asyncio.sleep(HEADLESS_S)
        await keep_head_running(head)

    assert set(await on_ray.load(restart_head())) == {grpc.StatusCode.OK}
    assert await asyncio.to_thread(on_ray.states) == before


async def test_a_killed_actor_comes_back_as_another_incarnation(on_ray: OnRay) -> None:
    before = await asyncio.to_thread(on_ray.state, "decode-0")
    codes = await on_ray.load(asyncio.to_thread(os.kill, before.pid, signal.SIGKILL))
    assert set(codes) == {grpc.StatusCode.OK}
    await asyncio.to_thread(eventually, on_ray.whole, RESTART_S, "all services are ready")
    after = await asyncio.to_thread(on_ray.state, "decode-0")
    assert after.incarnation != before.incarnation


async def test_a_lost_node_fails_no_request_and_its_services_come_back_on_another(on_ray: OnRay) -> None:
    lost = (await asyncio.to_thread(on_ray.state, "prefill-0")).node
    on_ray.raylets.add_node(num_cpus=2, **NODE)
    models = (on_ray.folder / "models").rename(on_ray.folder / "away")  # the model comes from Ray
    assert set(await on_ray.load(asyncio.to_thread(on_ray.kill_raylet, lost))) == {grpc.StatusCode.OK}
    await asyncio.to_thread(eventually, on_ray.whole, RESTART_S, "all services are ready")
    assert (await asyncio.to_thread(on_ray.state, "prefill-0")).node != lost
    assert await asyncio.to_thread(on_ray.answer)
    models.rename(on_ray.folder / "models")


async def test_scaling_down_fails_no_request(on_ray: OnRay) -> None:
    def change() -> None:
        done = on_ray.up(decode=1)
        assert done.returncode == 0, done.stdout + done.stderr

    assert set(await on_ray.load(asyncio.to_thread(change))) == {grpc.StatusCode.OK}
    assert await asyncio.to_thread(on_ray.whole, [name for name in SERVICES if name != "decode-1"])


async def test_changed_settings_replace_one_worker_after_another_and_fail_no_request(on_ray: OnRay) -> None:
    before = await asyncio.to_thread(on_ray.states)

    def change() -> None:
        done = on_ray.up(settings={"max_num_seqs": 24})
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.count("changes ") == 2  # a pair at a time

    assert set(await on_ray.load(asyncio.to_thread(change))) == {grpc.StatusCode.OK}
    assert await asyncio.to_thread(on_ray.whole)
    after = await asyncio.to_thread(on_ray.states)
    assert {name for name in SERVICES if after[name] != before[name]} == set(WORKERS)


async def test_scaling_up_fails_no_request_and_what_cannot_be_placed_is_named(on_ray: OnRay) -> None:
    await asyncio.to_thread(on_ray.up, decode=1)

    def change() -> None:
        done = on_ray.up(decode=2, name="gpu", role="decode", resources={"limits": {"nvidia.com/gpu": 1}})
        assert done.returncode == 1
        assert "gpu-0 waits for its start" in done.stdout
        assert "GPU: 1 needed, 0 free of 0" in " ".join(done.stdout.split())

    assert set(await on_ray.load(asyncio.to_thread(change))) == {grpc.StatusCode.OK}

    def rest_is_whole() -> bool:
        states = on_ray.states()
        return isinstance(states.pop("gpu-0"), str) and all(
            isinstance(s, ActorState) and s.ready for s in states.values()
        )

    await asyncio.to_thread(eventually, rest_is_whole, RESTART_S, "all services but one are ready")


async def test_a_head_that_is_slow_is_waited_for_with_one_line(on_ray: OnRay) -> None:
    [head] = on_ray.raylets.head_node.all_processes["gcs_server"]
    head.process.send_signal(signal.SIGSTOP)
    asking = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tandem", "status", *on_ray.options, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert asking.stdout is not None
    try:
        first = await asyncio.wait_for(asking.stdout.readline(), COMMAND_S)
    finally:
        head.process.send_signal(signal.SIGCONT)
    output, errors = await asyncio.wait_for(asking.communicate(), COMMAND_S)
    assert first.decode() == f"waits for Ray's head at {on_ray.raylets.address}, for 20 s at most\n"
    assert asking.returncode == 0, errors
    assert all(name in output.decode() for name in SERVICES)
    assert "Traceback" not in errors.decode()


def test_a_head_that_is_not_there_is_said_in_one_line(tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_ports(1)[0]}"
    command = [sys.executable, "-m", "tandem", "up", f"--ray={address}", "--detach", "--ready-timeout-s=3"]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=COMMAND_S, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("tandem up: Ray's head at ")
    assert "did not answer within 3 s" in done.stderr
    assert "Traceback" not in done.stderr


def test_down_after_a_lost_node_leaves_nothing(on_ray: OnRay, capsys: pytest.CaptureFixture[str]) -> None:
    pids = [state.pid for state in on_ray.states().values() if isinstance(state, ActorState)]
    assert len(pids) == len(SERVICES)
    on_ray.kill_raylet(on_ray.state("decode-0").node)
    began = time.monotonic()
    down(on_ray.options)
    assert time.monotonic() - began < DOWN_S
    assert capsys.readouterr().out.endswith(f"stopped {', '.join(SERVICES)}\n")
    assert on_ray.states() == {}
    eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), 10, "every process ends")
    with pytest.raises(SystemExit, match="no cluster runs"):
        status(on_ray.options)
