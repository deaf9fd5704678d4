"""A request that crashes whatever computes it is refused after two workers; others are answered as without it."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import pytest

from tandem.engine import EngineConfig, Request, SamplingParams, StepTime
from tests.e2e.cluster import BOUND_S, RunningCluster, eventually, running_cluster
from tests.e2e.crashing.plant import ABORTS, IN_DECODE, IN_PREFILL, PLACE, RAISES
from tests.e2e.test_migration import Answers, Baseline, service, undisturbed

pytestmark = pytest.mark.long
ROOT = Path(__file__).parents[2]
PREFILLS, DECODES = 2, 3
NEIGHBOURS, NEW_TOKENS = 32, 40


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, config_only: Path) -> Iterator[RunningCluster]:
    options = [f"--model-path={config_only}", "--model-name=null", "--engine=null", "--disaggregation=require"]
    options += [f"--prefill={PREFILLS}", f"--decode={DECODES}", "--null-speedup=0.2"]
    env = {"PYTHONPATH": f"{ROOT / 'tests/e2e/crashing'}:{ROOT}"}
    with running_cluster(tmp_path_factory.mktemp("poison"), *options, env=env) as cluster:
        eventually(lambda: all_linked(cluster), BOUND_S, "every pair has moved a block")
        yield cluster


def all_linked(cluster: RunningCluster) -> bool:
    return bool(httpx.get(f"{cluster.http}/health/ready").json()["linked_pairs"] == PREFILLS * DECODES)


def crashes(cluster: RunningCluster) -> list[str]:
    said = (cluster.logs.parent / "up.log").read_text(encoding="utf-8")
    return re.findall(r"(\w+-\d) ended with status (?:-11|-6|1)\b", said)


def neighbours() -> list[Request]:
    dice = random.Random(3)
    return [
        Request(
            f"r{i}",
            dice.choices(range(1, 4000), k=dice.randint(1, 24)),
            SamplingParams(max_tokens=NEW_TOKENS, temperature=float(i % 2), seed=i),
        )
        for i in range(NEIGHBOURS)
    ]


def poison(token_id: int) -> Request:
    return Request("poison", [token_id, 5, 6], SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0))


@pytest.mark.parametrize(
    ("token_id", "role", "num_written"),
    [
        (IN_DECODE, "decode", PLACE),
        (ABORTS, "decode", PLACE),
        (RAISES, "decode", PLACE + 1),
        (IN_PREFILL, "prefill", 0),
    ],
)
async def test_neighbours_of_a_crashing_request_finish(
    fleet: RunningCluster, config_only: Path, at_baseline: Baseline, token_id: int, role: str, num_written: int
) -> None:
    config = EngineConfig(config_only, "null", num_blocks=4096, null=StepTime(speedup=1e6))
    expected = undisturbed(config, neighbours())
    before = len(crashes(fleet))
    async with service(fleet) as stub:
        answers = Answers(stub, "null", neighbours())
        await answers.begun()
        crashing = Answers(stub, "null", [poison(token_id)])
        assert await answers.all() == expected
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await crashing.all()
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "two workers have crashed" in str(refused.value.details())
    assert len(crashing.tokens[0]) <= num_written
    async with asyncio.timeout(90):
        while not all_linked(fleet) or not await at_baseline(fleet):
            await asyncio.sleep(0.05)
    async with service(fleet) as stub:  # the same again ends nobody
        with pytest.raises(grpc.aio.AioRpcError, match="two workers have crashed"):
            await Answers(stub, "null", [poison(token_id)]).all()
    assert all_linked(fleet)
    died = crashes(fleet)[before:]
    assert len(died) == 2
    assert all(name.startswith(role) for name in died)


async def test_http_says_poison(fleet: RunningCluster) -> None:
    body = {"model": "null", "prompt": [IN_DECODE, 7, 8], "max_tokens": NEW_TOKENS, "ignore_eos": True}
    async with httpx.AsyncClient(base_url=fleet.http, timeout=60) as client:
        answer = await client.post("/v1/completions", json=body)
    assert answer.status_code == 422
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "poison")
