"""I2 of conversations: the next turn's prompt is the last turn's prompt and answer, and nobody computes those again."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import grpc
import pytest

from tandem.engine import Engine, SamplingParams
from tandem.v1 import llm_pb2, llm_pb2_grpc
from tests.e2e.cluster import BOUND_S, RunningCluster
from tests.e2e.test_exact import oracle

pytestmark = pytest.mark.long

BLOCK, TURNS, ANSWER, SAID = 16, 5, 50, 5
# A client takes longer to say something than the registry to hear what is cached.
THINKING_S = 0.5


@pytest.fixture(params=["shm", "tcp"])
def service(request: pytest.FixtureRequest) -> Iterator[llm_pb2_grpc.LLMServiceStub]:
    cluster: RunningCluster = request.getfixturevalue(f"{request.param}_cluster")
    with grpc.insecure_channel(cluster.grpc) as channel:
        yield llm_pb2_grpc.LLMServiceStub(channel)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_turns_equal_one_process_wherever_the_answers_kv_comes_from(
    service: llm_pb2_grpc.LLMServiceStub, one_process_engine: Engine, temperature: float
) -> None:
    chance = random.Random(f"conversation at {temperature}")
    prompt, before = chance.choices(range(1, 4096), k=70), 0
    for turn in range(TURNS):
        sampling = llm_pb2.SamplingParams(
            max_tokens=ANSWER, temperature=temperature, seed=turn, repetition_penalty=1.0, top_p=1.0, ignore_eos=True
        )
        asked = llm_pb2.GenerateRequest(model="tandem-demo", token_ids=llm_pb2.TokenIds(ids=prompt), sampling=sampling)
        tokens: list[int] = []
        for last in service.Generate(asked, timeout=BOUND_S):
            tokens += last.token_ids
        alone = SamplingParams(max_tokens=ANSWER, temperature=temperature, seed=turn)
        assert tokens == oracle(one_process_engine, prompt, alone)[0]
        assert last.path.kind == llm_pb2.Path.KIND_REMOTE_PREFILL
        # A busy machine may find it quicker to compute an answer again than to have it sent.
        computed_here = (len(prompt) - ANSWER - SAID) // BLOCK * BLOCK if turn else 0
        assert last.usage.cached_tokens == (before if last.path.fetched_tokens else min(before, computed_here))
        assert last.path.fetched_tokens in (0, before - computed_here)
        assert last.path.fetched_from == ("decode-0" if last.path.fetched_tokens else "")
        before = (len(prompt) + ANSWER - 1) // BLOCK * BLOCK  # the answer's last token was never computed on
        prompt = [*prompt, *tokens, *chance.choices(range(1, 4096), k=SAID)]
        time.sleep(THINKING_S)
