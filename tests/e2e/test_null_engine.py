"""A fleet of null engines: the services, the protocol and the KV frames are real, so the contract is too."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import grpc
import httpx
import pytest
from openai import AsyncOpenAI

from tandem.engine import Engine, EngineConfig, Request, SamplingParams, StepTime
from tandem.registry import Registry, Role
from tandem.v1 import llm_pb2, llm_pb2_grpc
from tests.e2e.cluster import BOUND_S, RunningCluster, eventually, metric, running_cluster

pytestmark = pytest.mark.long
WORKERS, SHARED, BLOCK = 3, 64, 16
EOS = frozenset({0})  # what the gateway adds, and the null engine never draws


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, config_only: Path) -> Iterator[RunningCluster]:
    options = [f"--model-path={config_only}", "--model-name=null", "--engine=null", "--disaggregation=require"]
    options += [f"--prefill={WORKERS}", f"--decode={WORKERS}"]
    with running_cluster(tmp_path_factory.mktemp("null"), *options, "--null-speedup=10") as cluster:
        ready = f"{cluster.http}/health/ready"
        eventually(
            lambda: httpx.get(ready).json()["linked_pairs"] == WORKERS**2, BOUND_S, "every pair has moved a block"
        )
        yield cluster


def prompts() -> list[list[int]]:
    """Some begin alike."""
    dice = random.Random(5)
    shared = dice.choices(range(1, 4096), k=SHARED)
    return [
        shared[: SHARED * (i % 2)] + dice.choices(range(1, 4096), k=dice.randint(40, 200)) for i in range(16 * WORKERS)
    ]


async def generate(service: llm_pb2_grpc.LLMServiceAsyncStub, prompt: list[int]) -> llm_pb2.GenerateUnaryResponse:
    sampling = llm_pb2.SamplingParams(max_tokens=12, seed=3, temperature=1.0)
    request = llm_pb2.GenerateRequest(model="null", token_ids=llm_pb2.TokenIds(ids=prompt), sampling=sampling)
    return await service.GenerateUnary(llm_pb2.GenerateUnaryRequest(generate=request), timeout=120)


def oracle(folder: Path, prompt: list[int]) -> list[int]:
    engine = Engine(EngineConfig(folder, "null", num_blocks=64, null=StepTime(speedup=1e6)))
    engine.add(Request("r", prompt, SamplingParams(max_tokens=12, seed=3, stop_token_ids=EOS)))
    return [token.token_id for _ in range(12) for output in engine.step() for token in output.tokens]


async def test_a_fleet_answers_as_one_engine_and_moves_every_byte(
    fleet: RunningCluster, config_only: Path, at_baseline: Callable[[RunningCluster], Awaitable[bool]]
) -> None:
    asked = prompts()
    async with grpc.aio.insecure_channel(fleet.grpc) as channel:
        service = llm_pb2_grpc.LLMServiceStub(channel)
        answers = await asyncio.gather(*(generate(service, prompt) for prompt in asked))
        await until_everyone_tells_what_was_measured(fleet, service)
    assert [list(answer.token_ids) for answer in answers] == [oracle(config_only, prompt) for prompt in asked]
    for role in ("prefill_worker", "decode_worker"):
        assert len({getattr(answer.path, role) for answer in answers}) == WORKERS
    for prompt, answer in zip(asked, answers, strict=True):
        most = -(-len(prompt) // BLOCK) * BLOCK * 32
        assert answer.path.transfer_bytes <= most
        assert answer.path.transfer_bytes >= most - 32 * SHARED
    async with asyncio.timeout(60):
        while not await at_baseline(fleet):
            await asyncio.sleep(0.05)


async def until_everyone_tells_what_was_measured(
    fleet: RunningCluster, service: llm_pb2_grpc.LLMServiceAsyncStub
) -> None:
    """Workers say a rate once they have seen some steps, however many prompts went into one. One that seemed slow gets
    more of them only where the others have a queue."""
    dice, count = random.Random(6), WORKERS
    async with asyncio.timeout(60):
        while not await everyone_tells_what_was_measured(fleet):
            wave = [dice.choices(range(1, 4096), k=100) for _ in range(count)]
            await asyncio.gather(*(generate(service, prompt) for prompt in wave))
            count = min(2 * count, 100 * WORKERS)


async def everyone_tells_what_was_measured(fleet: RunningCluster) -> bool:
    """With the heartbeat that follows the work."""
    registry = Registry.connect(fleet.redis_url, timeout=30.0)
    workers = await registry.workers()
    await registry.close()
    prefills = [worker.load for worker in workers if worker.info.role is Role.PREFILL]
    decodes = [worker.load for worker in workers if worker.info.role is Role.DECODE]
    assert all(load.step_s == 0 or load.step_s >= 0.001 for load in decodes)
    told = [min(load.prefill_tokens_per_s, load.transfer_tokens_per_s) for load in prefills]
    return all(told) and all(load.step_s for load in decodes)


async def first_line(address: str, prompt: list[int]) -> str:
    """Returns what a stream says first that was asked for behind a burst."""
    body = {"model": "null", "prompt": prompt, "max_tokens": 8, "stream": True}

    def a_line_waits() -> bool:
        return metric(address, "vllm:num_requests_waiting") > 32

    await asyncio.to_thread(eventually, a_line_waits, BOUND_S, "more wait than are prefilled at once")
    url = f"{address}/v1/completions"
    async with httpx.AsyncClient(timeout=120) as http, http.stream("POST", url, json=body) as answer:
        lines = [line async for line in answer.aiter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    return lines[0]


async def test_a_plain_burst_is_answered_whole_on_defaults(tmp_path: Path, config_only: Path) -> None:
    """By openai's client, which tries nothing again: a prefill worker needs some seconds for the long prompts.

    A starved machine may take more than the client's 5 s to open so many connections: the kernel accepts them at once.
    """
    options = [f"--model-path={config_only}", "--model-name=null", "--engine=null", "--null-speedup=0.5"]
    prompts = [[1 + i % 4000] * 8 for i in range(512)] + [[1 + i] * 1141 for i in range(64)]
    with running_cluster(tmp_path, *options) as cluster:
        async with AsyncOpenAI(base_url=f"{cluster.http}/v1", api_key="none", max_retries=0, timeout=120) as client:
            asked = [client.completions.create(model="null", prompt=prompt, max_tokens=8) for prompt in prompts]
            *answers, first = await asyncio.gather(*asked, first_line(cluster.http, prompts[-1]))
    assert first == ": waiting", "a stream in the line has a head before its turn"
    assert [answer.usage.prompt_tokens for answer in answers if answer.usage] == [len(prompt) for prompt in prompts]
