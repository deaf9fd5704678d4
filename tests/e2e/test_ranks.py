"""Workers of several ranks, as `tandem up` starts them: one rank's tokens, and no answer lost with a rank."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import psutil
import pytest

from tandem.commands.up import DEMO_MODEL
from tandem.engine import Engine, EngineConfig, Request, SamplingParams
from tandem.v1 import llm_pb2, llm_pb2_grpc
from tests.e2e.cluster import BOUND_S, RunningCluster, eventually, running_cluster
from tests.e2e.test_migration import Answers, Baseline, asked, service, undisturbed
from tests.engine.peft_folders import make_adapter

MANY, NEW_TOKENS = 100, 40
SAMPLING = SamplingParams(max_tokens=24, temperature=0.0)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    make_adapter(folder / "a0", DEMO_MODEL, size=0.1)
    return folder


@pytest.fixture(
    scope="module",
    params=[
        "2+1 auto",
        pytest.param("1+2 auto", marks=pytest.mark.long),
        pytest.param("2+1 int8", marks=pytest.mark.long),
        pytest.param("1+2 int8", marks=pytest.mark.long),
    ],
)
def layout(request: pytest.FixtureRequest) -> tuple[int, int, str]:
    """Ranks of prefill and of decode workers, and the dtype of KV."""
    ranks, kv = request.param.split()
    prefill, decode = map(int, ranks.split("+"))
    return prefill, decode, kv


@pytest.fixture(scope="module")
def cluster(
    layout: tuple[int, int, str], adapters: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningCluster]:
    prefill, decode, kv = layout
    options = [
        f"--prefill-tensor-parallel={prefill}", f"--decode-tensor-parallel={decode}", f"--kv-cache-dtype={kv}",
        "--prefill=2", "--decode=2", "--dtype=float32", "--disaggregation=require", f"--lora-dir={adapters}",
    ]  # fmt: skip
    with running_cluster(tmp_path_factory.mktemp("ranks"), *options) as cluster:
        eventually(lambda: all_linked(cluster), BOUND_S, "every pair has moved a block")
        yield cluster


def all_linked(cluster: RunningCluster) -> bool:
    return bool(httpx.get(f"{cluster.http}/health/ready", timeout=BOUND_S).json()["linked_pairs"] == 4)


def config_of(kv: str, **more: Path) -> EngineConfig:
    return EngineConfig(DEMO_MODEL, "oracle", dtype="float32", num_blocks=512, kv_cache_dtype=kv, **more)


def ranks_of(pid: int) -> list[int]:
    """Process ids of the ranks beside a worker's process."""
    children = psutil.Process(pid).children()
    return [child.pid for child in children if "tandem.engine.loading.rank" in child.cmdline()]


def test_tokens_are_those_of_one_rank(cluster: RunningCluster, layout: tuple[int, int, str], adapters: Path) -> None:
    """Remote prefills, prefix hits and adapters."""
    prefill, decode, kv = layout
    assert [len(ranks_of(pid)) for pid in cluster.pids("prefill")] == [prefill - 1] * 2
    assert [len(ranks_of(pid)) for pid in cluster.pids("decode")] == [decode - 1] * 2
    loaded = httpx.post(
        f"{cluster.http}/v1/load_lora_adapter", json={"lora_name": "a0", "lora_path": "a0"}, timeout=BOUND_S
    )
    assert loaded.status_code == 200, loaded.text
    engine = Engine(config_of(kv, lora_dir=adapters))
    prompts = [random.Random(length).choices(range(1, 4096), k=length) for length in (1, 16, 33, 600)]
    with grpc.insecure_channel(cluster.grpc) as channel:
        stub = llm_pb2_grpc.LLMServiceStub(channel)
        for name in ("tandem-demo", "a0"):
            for prompt in prompts:
                expected = answer_of(engine, prompt, name)
                cached = [answered(stub, prompt, name, expected) for _ in range(2)]
                assert cached[1] >= len(prompt) - len(prompt) % 16 - 16


def answer_of(engine: Engine, prompt: list[int], name: str) -> list[int]:
    assert engine.adapters is not None
    ref = engine.adapters.read("a0", "a0") if name == "a0" else None
    adapter = engine.adapters.get(ref) if ref else None
    engine.add(Request("oracle", prompt, SAMPLING, lora=ref, adapter=adapter))
    outputs = []
    while engine.has_work():
        outputs += engine.step()
    return [token.token_id for output in outputs for token in output.tokens]


def answered(stub: llm_pb2_grpc.LLMServiceStub, prompt: list[int], name: str, expected: list[int]) -> int:
    """Compares an answer with the expected tokens, and returns how many of the prompt's tokens were cached."""
    sampling = llm_pb2.SamplingParams(
        max_tokens=len(expected), temperature=0.0, ignore_eos=True, top_p=1.0, repetition_penalty=1.0
    )
    asking = llm_pb2.GenerateRequest(model=name, token_ids=llm_pb2.TokenIds(ids=prompt), sampling=sampling)
    responses = list(stub.Generate(asking, timeout=BOUND_S))
    assert [token for response in responses for token in response.token_ids] == expected, (name, len(prompt))
    return int(responses[-1].usage.cached_tokens)


@pytest.mark.long
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_lost_rank_loses_no_answer(
    cluster: RunningCluster, layout: tuple[int, int, str], at_baseline: Baseline, how: signal.Signals
) -> None:
    """A rank is killed, or stands still, under a hundred answers: its worker ends, and they go on elsewhere."""
    prefill, _, kv = layout
    role = "prefill" if prefill > 1 else "decode"
    requests = asked(MANY, NEW_TOKENS)
    expected = undisturbed(config_of(kv), requests)
    worker = cluster.pids(role)[0]
    (rank,) = ranks_of(worker)
    async with service(cluster) as stub:
        answers = Answers(stub, "tandem-demo", requests)
        await (answers.begun() if role == "prefill" else answers.written(MANY))
        os.kill(rank, how)
        assert await answers.all() == expected
    assert role == "prefill" or answers.migrated > 0
    eventually(lambda: worker not in cluster.pids(role), BOUND_S, "the worker has ended")
    eventually(lambda: len(cluster.pids(role)) == 2 and all_linked(cluster), BOUND_S, "another one is there")
    eventually(lambda: len(ranks_of(cluster.pids(role)[0])) == 1, BOUND_S, "with its rank")
    assert not psutil.pid_exists(rank)
    assert await at_baseline(cluster)
