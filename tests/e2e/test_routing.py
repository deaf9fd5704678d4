"""Requests go where their prefix is: two prefill and two decode workers, real KV, prompts that share beginnings."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable, Iterator

import grpc
import httpx
import pytest

from tandem.v1 import llm_pb2, llm_pb2_grpc
from tests.e2e.cluster import RunningCluster, eventually, running_cluster

pytestmark = pytest.mark.long
BLOCK = 16
SHARED = 20 * BLOCK
Responses = Iterable[llm_pb2.GenerateResponse]
Start = Callable[..., Responses]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    folder = tmp_path_factory.mktemp("routing")
    with running_cluster(folder, "--prefill=2", "--decode=2", "--disaggregation=require") as cluster:
        eventually(lambda: linked_pairs(cluster) == 4, 30.0, "every pair has moved a block")
        yield cluster


def linked_pairs(cluster: RunningCluster) -> int:
    found: int = httpx.get(f"{cluster.http}/health/ready").json()["linked_pairs"]
    return found


@pytest.fixture
def start(pairs: RunningCluster) -> Iterator[Start]:
    """Begins to generate a few tokens; `last` waits for the answer."""
    with grpc.insecure_channel(pairs.grpc) as channel:
        service = llm_pb2_grpc.LLMServiceStub(channel)

        def begin(prompt: list[int], salt: str = "") -> Responses:
            request = llm_pb2.GenerateRequest(
                model="tandem-demo", token_ids=llm_pb2.TokenIds(ids=prompt), cache_salt=salt,
                sampling=llm_pb2.SamplingParams(max_tokens=2, temperature=0),
            )  # fmt: skip
            call: Responses = service.Generate(request, timeout=60)
            return call

        yield begin


@pytest.fixture
def idle(
    pairs: RunningCluster, at_baseline: Callable[[RunningCluster], Awaitable[bool]]
) -> Callable[[], Awaitable[None]]:
    """Waits until every worker has reported that it is idle and every reservation is released."""

    async def wait() -> None:
        async with asyncio.timeout(10):
            while not await at_baseline(pairs):
                await asyncio.sleep(0.05)

    return wait


def last(responses: Responses) -> llm_pb2.GenerateResponse:
    *_, response = responses
    return response


def tokens(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(1, 4096), k=count)


def places(response: llm_pb2.GenerateResponse) -> tuple[str, str]:
    return response.path.prefill_worker, response.path.decode_worker


async def test_a_shared_prefix_draws_requests_and_saves_work_and_bytes(
    start: Start, idle: Callable[[], Awaitable[None]]
) -> None:
    """Six conversations, begun at once and spread over the workers, then going on in turns."""
    prompts = {seed: tokens(SHARED, seed) for seed in range(6)}
    calls = {seed: start(prompt) for seed, prompt in prompts.items()}
    first = {seed: last(call) for seed, call in calls.items()}
    assert {p for p, _ in map(places, first.values())} == {"prefill-0", "prefill-1"}
    assert {d for _, d in map(places, first.values())} == {"decode-0", "decode-1"}
    for turn in (1, 2):
        await idle()
        for seed, prompt in prompts.items():
            prompt += tokens(2 * BLOCK, 100 * turn + seed)
            answer = last(start(prompt))
            held = SHARED + 2 * BLOCK * (turn - 1)
            assert places(answer) == places(first[seed])
            assert f"{held} prompt tokens cached there, {held} at decode" in answer.path.reason
            assert answer.usage.cached_tokens == held
            moved = answer.path.transfer_bytes / first[seed].path.transfer_bytes
            assert moved == pytest.approx(2 * BLOCK / SHARED)


async def test_another_salt_never_hits(start: Start, idle: Callable[[], Awaitable[None]]) -> None:
    prompt = tokens(SHARED, 50)
    first = last(start(prompt, salt="one tenant"))
    await idle()
    again = last(start(prompt, salt="one tenant"))
    assert again.usage.cached_tokens == SHARED - 1  # the last token is always computed
    for salt in ("another tenant", ""):
        answer = last(start(prompt, salt=salt))
        assert answer.usage.cached_tokens == 0
        assert "0 prompt tokens cached there, 0 at decode" in answer.path.reason
        assert answer.path.transfer_bytes == first.path.transfer_bytes


async def test_the_second_of_two_requests_at_once_follows_the_first(
    start: Start, idle: Callable[[], Awaitable[None]]
) -> None:
    await idle()
    prompt = tokens(SHARED, 60)
    both = [start(prompt) for _ in range(2)]
    one, other = map(last, both)
    assert one.path.prefill_worker == other.path.prefill_worker
    hits = {answer.path.reason.partition(" prompt tokens")[0] for answer in (one, other)}
    assert hits == {"remote prefill: 0", f"remote prefill: {SHARED}"}
    await idle()
