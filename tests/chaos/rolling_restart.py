"""Every process is restarted, one after the other, beneath clients that retry as usual: nobody sees anything of it.

Two gateways behind a balancer that only knows TCP; answers are longer than the workers' drain. What the cluster can
answer is measured first, then requests come at 80 % of it, however long the answers to those before them take. It takes
two minutes or more, so `make soak` runs it, and `make test` does not.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import grpc
import httpx
import openai
import psutil
import pytest

from tandem.local import free_ports
from tandem.v1 import llm_pb2, llm_pb2_grpc
from tests.chaos.balancer import balanced
from tests.e2e.cluster import START_BOUND_S, STOP_BOUND_S, eventually, runs

TOKENS = 40
SEQUENCES = 8  # a decode worker's at once: full long before this machine is, or the clients
LOAD = 0.8
RETRY = json.dumps(
    {
        "methodConfig": [
            {
                "name": [{}],
                "retryPolicy": {
                    "maxAttempts": 4, "initialBackoff": "0.1s", "maxBackoff": "1s", "backoffMultiplier": 2,
                    "retryableStatusCodes": ["UNAVAILABLE"],
                },
            }
        ]
    }
)  # fmt: skip
CLUSTER = """
models: [{{id: m, name: nothing, weights: {{path: {model}}}}}]
workers:
  settings: {{engine: "null", null_step: {{speedup: 0.2}}, drain_s: 0.3, kv_memory: 8MiB, max_num_seqs: {sequences}}}
pools:
- {{name: p, role: prefill, model: m, replicas: 2}}
- {{name: d, role: decode, model: m, replicas: 2}}
gateway: {{replicas: 2, settings: {{http_port: {http}, grpc_port: {grpc}, disaggregation: require}}}}
redis: {{port: {redis}}}
"""


class RestartedFleet:
    def __init__(self, process: subprocess.Popen[bytes], http: int, grpc_port: int) -> None:
        self.http, self.grpc = (http, http + 1), (grpc_port, grpc_port + 1)
        self._process = process

    def pids(self, service: str) -> list[int]:
        """The one that has run for longest first."""
        return [child.pid for child in psutil.Process(self._process.pid).children() if runs(child, service)]

    def whole(self) -> bool:
        try:
            said = [httpx.get(f"http://127.0.0.1:{port}/health/ready", timeout=2.0) for port in self.http]
        except httpx.TransportError:
            return False
        reached = all(answer.status_code == 200 and answer.json()["registry_reached"] for answer in said)
        return reached and all(answer.json()["linked_pairs"] == 4 for answer in said)


def consecutive_ports() -> tuple[int, int, int]:
    """Two of HTTP, two of gRPC, one of Redis."""
    while True:
        ports = free_ports(5)
        if ports[1] == ports[0] + 1 and ports[3] == ports[2] + 1:
            return ports[0], ports[2], ports[4]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, demo_model: Path) -> Iterator[RestartedFleet]:
    folder, (http, grpc_port, redis) = tmp_path_factory.mktemp("rolling"), consecutive_ports()
    file = folder / "cluster.yaml"
    file.write_text(
        CLUSTER.format(model=demo_model, http=http, grpc=grpc_port, redis=redis, sequences=SEQUENCES), encoding="utf-8"
    )
    command = [sys.executable, "-m", "tandem", "up", f"--file={file}", f"--logs={folder / 'logs'}"]
    with (folder / "up.log").open("w", encoding="utf-8") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            fleet = RestartedFleet(process, http, grpc_port)
            eventually(fleet.whole, START_BOUND_S, "both gateways see every pair")
            yield fleet
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(STOP_BOUND_S)


class RestartLoad:
    """Requests of nine kinds, each always the same. Whatever is no whole answer stands in `failed`."""

    def __init__(self, client: openai.AsyncOpenAI, channel: grpc.aio.Channel) -> None:
        self.answered = 0
        self.failed: list[str] = []
        self._client, self._stub = client, llm_pb2_grpc.LLMServiceStub(channel)
        self._first: dict[int, str] = {}
        self._asked = 0
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def under_way(self) -> int:
        return len(self._tasks)

    async def capacity(self, seconds: float) -> float:
        """Answers a second where there are always more requests than the workers take."""
        loop = asyncio.get_running_loop()

        async def answers(end: float) -> int:
            before = self.answered
            while loop.time() < end:
                while self.under_way < 4 * SEQUENCES:
                    self.ask()
                await asyncio.sleep(0.02)
            return self.answered - before

        await answers(loop.time() + seconds / 2)
        return await answers(loop.time() + seconds) / seconds

    async def arrive(self, per_second: float) -> None:
        """Without end."""
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            self.ask()
            due += 1 / per_second
            await asyncio.sleep(due - loop.time())

    def ask(self) -> None:
        task = asyncio.create_task(self._ask(self._asked % 9))
        self._asked += 1
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def end(self) -> None:
        await asyncio.gather(*self._tasks)

    async def cancel(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _ask(self, i: int) -> None:
        kind = (self._whole, self._stream, self._grpc)[i % 3]
        try:
            said = await kind(f"caller {i} says")
        except (openai.OpenAIError, grpc.aio.AioRpcError, httpx.HTTPError) as error:
            self.failed.append(f"caller {i}: {error!r}")
            return
        self.answered += 1
        if said != self._first.setdefault(i, said):
            self.failed.append(f"caller {i}: {said!r} after {self._first[i]!r}")

    async def _whole(self, prompt: str) -> str:
        answer = await self._client.completions.create(
            model="nothing", prompt=prompt, max_tokens=TOKENS, seed=1, extra_body={"ignore_eos": True}
        )
        return answer.choices[0].text

    async def _stream(self, prompt: str) -> str:
        stream = await self._client.completions.create(
            model="nothing", prompt=prompt, max_tokens=TOKENS, seed=1, stream=True, extra_body={"ignore_eos": True}
        )
        return "".join([part.choices[0].text async for part in stream if part.choices])

    async def _grpc(self, prompt: str) -> str:
        sampling = llm_pb2.SamplingParams(max_tokens=TOKENS, seed=1, temperature=1, top_p=1, ignore_eos=True)
        request = llm_pb2.GenerateRequest(model="nothing", prompt=prompt, sampling=sampling)
        return "".join([part.text async for part in self._stub.Generate(request, timeout=60)])


@asynccontextmanager
async def load(fleet: RestartedFleet) -> AsyncIterator[RestartLoad]:
    async with AsyncExitStack() as stack:
        http, grpc_port = [await stack.enter_async_context(balanced(ports)) for ports in (fleet.http, fleet.grpc)]
        client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{http}/v1", api_key="none", max_retries=4, timeout=60)
        await stack.enter_async_context(client)
        options = [("grpc.service_config", RETRY), ("grpc.enable_retries", 1)]
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{grpc_port}", options=options)
        load = RestartLoad(client, await stack.enter_async_context(channel))
        stack.push_async_callback(load.cancel)
        yield load


async def answered(load: RestartLoad, more: int) -> None:
    wanted = load.answered + more
    async with asyncio.timeout(60):
        while load.answered < wanted and not load.failed:
            await asyncio.sleep(0.02)


async def restarted(fleet: RestartedFleet, service: str) -> None:
    """The one of them that has run for longest ends, and another is whole in its place."""
    pid = fleet.pids(service)[0]
    os.kill(pid, signal.SIGTERM)
    async with asyncio.timeout(90):
        while psutil.pid_exists(pid) or not await asyncio.to_thread(fleet.whole):
            await asyncio.sleep(0.05)


@pytest.mark.timeout(600)
async def test_every_process_is_restarted_beneath_load(fleet: RestartedFleet) -> None:
    async with load(fleet) as clients:
        capacity = await clients.capacity(10)
        await clients.end()
        print(f"the cluster answers {capacity:.1f} requests/s; {LOAD * capacity:.1f} come")
        arriving = asyncio.create_task(clients.arrive(LOAD * capacity))
        for service in ("gateway", "decode", "prefill", "gateway", "kvstore", "decode"):
            await restarted(fleet, service)
            most = clients.under_way
            await answered(clients, 4 * SEQUENCES)
            print(f"{service}: {most} under way as it was back, {clients.answered} answered in all")
            assert clients.failed == []
        assert not arriving.done()
        arriving.cancel()
        await clients.end()
    assert clients.failed == []
