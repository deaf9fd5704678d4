"""Decode workers that die, stop or drain in mid-answer: every answer goes on elsewhere, as if nothing had been.

Null engines, whose tokens depend on every KV byte before them; and the demo model in float32.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import httpx
import jsonschema
import pytest

from tandem import grammar
from tandem.engine import Engine, EngineConfig, Request, SamplingParams, StepTime
from tandem.v1 import llm_pb2, llm_pb2_grpc
from tests.e2e.cluster import BOUND_S, RunningCluster, eventually, running_cluster

pytestmark = pytest.mark.long
WORD = {"type": "string", "minLength": 8, "maxLength": 8}
WORDS = {"type": "array", "items": WORD, "minItems": 24, "maxItems": 24}  # 160 tokens or more
MANY = int(os.environ.get("ANSWERS", "120"))
NEW_TOKENS, DECODES = 40, 3
Baseline = Callable[[RunningCluster], Awaitable[bool]]


def asked(count: int, new_tokens: int) -> list[Request]:
    """Prompts that partly begin alike; every other one greedy, the rest seeded."""
    dice = random.Random(7)
    shared = dice.choices(range(1, 4096), k=32)
    return [
        Request(
            f"r{i}",
            shared[: 16 * (i % 2)] + dice.choices(range(1, 4096), k=dice.randint(1, 24)),
            SamplingParams(max_tokens=new_tokens, temperature=float(i % 2), seed=i),
        )
        for i in range(count)
    ]


def held_to_words(request: Request) -> Request:
    made = grammar.of_json_schema(WORDS)
    return replace(request, sampling=replace(request.sampling, grammar=made, stop_token_ids=frozenset({0})))


def undisturbed(config: EngineConfig, requests: Sequence[Request]) -> list[list[int]]:
    """The answer of one engine alone."""
    engine = Engine(config)
    tokens = {request.request_id: list[int]() for request in requests}
    for request in requests:
        engine.add(request)
    while engine.has_work():
        for output in engine.step():
            tokens[output.request_id] += [token.token_id for token in output.tokens]
    return list(tokens.values())


class Answers:
    """Streams of all requests at once."""

    def __init__(self, service: llm_pb2_grpc.LLMServiceAsyncStub, model: str, requests: Sequence[Request]) -> None:
        self.tokens: list[list[int]] = [[] for _ in requests]
        self.texts = [""] * len(requests)
        self.last: list[llm_pb2.GenerateResponse] = [llm_pb2.GenerateResponse() for _ in requests]
        self._tasks = [
            asyncio.create_task(self._read(i, service, model, request)) for i, request in enumerate(requests)
        ]

    async def _read(self, i: int, service: llm_pb2_grpc.LLMServiceAsyncStub, model: str, request: Request) -> None:
        sampling = llm_pb2.SamplingParams(
            max_tokens=request.sampling.max_tokens, temperature=request.sampling.temperature,
            seed=request.sampling.seed, ignore_eos=True, top_p=1.0, repetition_penalty=1.0,
        )  # fmt: skip
        held_to = llm_pb2.StructuredOutputs(json=json.dumps(WORDS)) if request.sampling.grammar else None
        asked = llm_pb2.GenerateRequest(
            model=model, token_ids=llm_pb2.TokenIds(ids=request.token_ids), sampling=sampling,
            structured_outputs=held_to,
        )  # fmt: skip
        async for self.last[i] in service.Generate(asked, timeout=120):
            self.tokens[i] += self.last[i].token_ids
            self.texts[i] += self.last[i].text

    async def begun(self) -> None:
        """Until a first token has come."""
        async with asyncio.timeout(90):
            while not any(self.tokens):
                await asyncio.sleep(0.005)

    async def written(self, least: int) -> None:
        """Until every answer has begun and some tokens have come."""
        async with asyncio.timeout(90):
            while sum(map(len, self.tokens)) < least or not all(self.tokens):
                await asyncio.sleep(0.005)

    async def going_on(self) -> None:
        """Until each that has not ended has more tokens than now: those that lost their worker go on on another."""
        now = [len(tokens) for tokens in self.tokens]

        def stands_still(i: int) -> bool:
            return not self._tasks[i].done() and len(self.tokens[i]) <= now[i]

        async with asyncio.timeout(90):
            while any(map(stands_still, range(len(now)))):
                await asyncio.sleep(0.005)

    async def all(self) -> list[list[int]]:
        await asyncio.gather(*self._tasks)
        return self.tokens

    @property
    def migrated(self) -> int:
        return sum(last.path.migrated for last in self.last)


@asynccontextmanager
async def service(cluster: RunningCluster) -> AsyncIterator[llm_pb2_grpc.LLMServiceAsyncStub]:
    async with grpc.aio.insecure_channel(cluster.grpc) as channel:
        yield llm_pb2_grpc.LLMServiceStub(channel)


def all_linked(cluster: RunningCluster, decodes: int) -> bool:
    return bool(httpx.get(f"{cluster.http}/health/ready").json()["linked_pairs"] == decodes)


async def shown(blow: Callable[[], Awaitable[Answers]], enough: Callable[[Answers], bool]) -> None:
    """Three times at most, should it come when most answers had ended: exact they are each time."""
    for _ in range(3):
        if enough(await blow()):
            return
    pytest.fail("never came in mid-answer")


async def restored(cluster: RunningCluster, at_baseline: Baseline) -> None:
    """Until every worker is back and nothing is held anywhere."""
    async with asyncio.timeout(90):
        while not all_linked(cluster, DECODES) or not await at_baseline(cluster):
            await asyncio.sleep(0.05)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, config_only: Path) -> Iterator[RunningCluster]:
    options = [f"--model-path={config_only}", "--model-name=null", "--engine=null", "--disaggregation=require"]
    options += ["--prefill=1", f"--decode={DECODES}", "--null-speedup=0.2", "--drain-s=1"]
    with running_cluster(tmp_path_factory.mktemp("migration"), *options) as cluster:
        eventually(lambda: all_linked(cluster, DECODES), BOUND_S, "every pair has moved a block")
        yield cluster


@pytest.fixture(scope="module")
def expected(config_only: Path) -> list[list[int]]:
    config = EngineConfig(config_only, "null", num_blocks=4096, null=StepTime(speedup=1e6))
    return undisturbed(config, asked(MANY, NEW_TOKENS))


async def test_a_killed_decode_worker_fails_nothing(
    fleet: RunningCluster, expected: list[list[int]], at_baseline: Baseline
) -> None:
    async def kill() -> Answers:
        killed = fleet.pids("decode")[0]
        async with service(fleet) as stub:
            answers = Answers(stub, "null", asked(MANY, NEW_TOKENS))
            await answers.written(MANY * NEW_TOKENS // 4)
            os.kill(killed, signal.SIGKILL)
            assert await answers.all() == expected
        await restored(fleet, at_baseline)
        return answers

    await shown(kill, lambda answers: answers.migrated > MANY // 6)


async def test_answers_that_have_migrated_migrate_again(
    fleet: RunningCluster, expected: list[list[int]], at_baseline: Baseline
) -> None:
    """Two of three are killed, so all goes on on the third; then that one is."""

    async def kill() -> Answers:
        *two, third = fleet.pids("decode")
        async with service(fleet) as stub:
            answers = Answers(stub, "null", asked(MANY, NEW_TOKENS))
            await answers.written(MANY)
            for pid in two:
                os.kill(pid, signal.SIGKILL)
            await answers.going_on()
            os.kill(third, signal.SIGKILL)
            assert await answers.all() == expected
        await restored(fleet, at_baseline)
        return answers

    await shown(kill, lambda answers: max(last.path.migrated for last in answers.last) >= 2)


async def test_what_outlasts_a_drain_moves(fleet: RunningCluster, config_only: Path, at_baseline: Baseline) -> None:
    long = asked(24, 100)
    whole = undisturbed(EngineConfig(config_only, "null", num_blocks=4096, null=StepTime(speedup=1e6)), long)

    async def drain() -> Answers:
        drained = fleet.pids("decode")[0]
        async with service(fleet) as stub:
            answers = Answers(stub, "null", long)
            await answers.written(24)
            os.kill(drained, signal.SIGTERM)
            assert await answers.all() == whole
        await restored(fleet, at_baseline)
        return answers

    await shown(drain, lambda answers: answers.migrated > 0)


async def test_a_stopped_decode_worker_holds_nothing_up(
    fleet: RunningCluster, expected: list[list[int]], at_baseline: Baseline
) -> None:
    """Stopped, not dead: its answers go on elsewhere, and when it is back it holds nothing of them."""

    async def stop() -> Answers:
        stopped = fleet.pids("decode")[0]
        async with service(fleet) as stub:
            answers = Answers(stub, "null", asked(MANY, NEW_TOKENS))
            await answers.written(MANY)
            os.kill(stopped, signal.SIGSTOP)
            try:
                assert await answers.all() == expected
            finally:
                os.kill(stopped, signal.SIGCONT)
        await restored(fleet, at_baseline)
        return answers

    await shown(stop, lambda answers: answers.migrated > 0)


async def test_the_models_own_tokens_go_on_exactly(demo_model: Path, tmp_path: Path) -> None:
    """Most of them held to a grammar, greedy and seeded."""
    requests = [held_to_words(request) if i % 4 < 3 else request for i, request in enumerate(asked(8, 240))]
    config = EngineConfig(demo_model, "oracle", dtype="float32", num_blocks=512, enable_prefix_caching=False)
    whole = undisturbed(config, requests)
    options = ("--dtype=float32", "--decode=2", "--disaggregation=require")
    with running_cluster(tmp_path, *options) as cluster:
        eventually(lambda: all_linked(cluster, 2), BOUND_S, "every pair has moved a block")

        async def kill() -> Answers:
            killed = cluster.pids("decode")[0]
            async with service(cluster) as stub:
                answers = Answers(stub, "tandem-demo", requests)
                await answers.written(8 * 12)
                os.kill(killed, signal.SIGKILL)
                assert await answers.all() == whole
            eventually(lambda: all_linked(cluster, 2), BOUND_S, "every pair is linked again")
            return answers

        def enough(answers: Answers) -> bool:
            for i, request in enumerate(requests):
                if request.sampling.grammar:
                    assert answers.last[i].finish_reason == llm_pb2.FINISH_REASON_STOP
                    jsonschema.validate(json.loads(answers.texts[i]), WORDS)
            return any(last.path.migrated for i, last in enumerate(answers.last) if requests[i].sampling.grammar)

        await shown(kill, enough)
