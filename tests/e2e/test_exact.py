"""I2: tokens of the disaggregated cluster equal the one-process engine's, token for token."""

from __future__ import annotations

import random
from collections.abc import Iterator

import grpc
import pytest

from tandem.engine import Engine, FinishReason, Request, SamplingParams
from tandem.v1 import llm_pb2, llm_pb2_grpc
from tests.e2e.cluster import RunningCluster, eventually

BLOCK = 16
REASONS = {llm_pb2.FINISH_REASON_STOP: FinishReason.STOP, llm_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH}


@pytest.fixture(params=[pytest.param("shm", marks=pytest.mark.long), "tcp"])
def cluster(request: pytest.FixtureRequest) -> RunningCluster:
    return request.getfixturevalue(f"{request.param}_cluster")


@pytest.fixture
def service(cluster: RunningCluster) -> Iterator[llm_pb2_grpc.LLMServiceStub]:
    with grpc.insecure_channel(cluster.grpc) as channel:
        yield llm_pb2_grpc.LLMServiceStub(channel)


def prompt_of(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(1, 4096), k=length)


def oracle(engine: Engine, prompt: list[int], sampling: SamplingParams) -> tuple[list[int], FinishReason]:
    engine.add(Request("oracle", prompt, sampling))
    tokens: list[int] = []
    while True:
        for output in engine.step():
            tokens += [token.token_id for token in output.tokens]
            if output.finished:
                assert output.finish_reason is not None
                engine.check_integrity()
                return tokens, output.finish_reason


def generate(
    service: llm_pb2_grpc.LLMServiceStub, prompt: list[int], sampling: llm_pb2.SamplingParams
) -> tuple[list[int], llm_pb2.GenerateResponse]:
    sampling.repetition_penalty, sampling.top_p = 1.0, 1.0  # the model's own defaults are others
    request = llm_pb2.GenerateRequest(model="tandem-demo", token_ids=llm_pb2.TokenIds(ids=prompt), sampling=sampling)
    tokens: list[int] = []
    for response in service.Generate(request, timeout=60):
        tokens += response.token_ids
    return tokens, response


LENGTHS = [1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK - 1, 3 * BLOCK, 3 * BLOCK + 1, 600]


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.long), 0.9])
def test_tokens_equal_the_one_process_engines(
    service: llm_pb2_grpc.LLMServiceStub, one_process_engine: Engine, length: int, temperature: float
) -> None:
    prompt = prompt_of(length, seed=length)
    expected, reason = oracle(
        one_process_engine,
        prompt,
        SamplingParams(max_tokens=40, temperature=temperature, seed=7, stop_token_ids=frozenset({0})),
    )
    sampling = llm_pb2.SamplingParams(max_tokens=40, temperature=temperature, seed=7)
    tokens, last = generate(service, prompt, sampling)
    assert tokens == expected
    assert REASONS[last.finish_reason] is reason
    assert last.usage.prompt_tokens == length
    assert last.usage.completion_tokens == len(expected)


def test_the_models_own_defaults_are_those_of_its_generation_config(
    service: llm_pb2_grpc.LLMServiceStub, one_process_engine: Engine
) -> None:
    prompt = prompt_of(40, seed=3)
    expected, _ = oracle(
        one_process_engine,
        prompt,
        SamplingParams(max_tokens=24, temperature=0.6, top_p=0.95, repetition_penalty=1.2, seed=9),
    )
    defaults = llm_pb2.SamplingParams(max_tokens=24, seed=9, ignore_eos=True)
    request = llm_pb2.GenerateRequest(model="tandem-demo", token_ids=llm_pb2.TokenIds(ids=prompt), sampling=defaults)
    assert [token for part in service.Generate(request, timeout=60) for token in part.token_ids] == expected


@pytest.mark.parametrize("method", ["none", "ngram", "draft"])
@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.long), 0.7])
def test_tokens_proposed_ahead(
    tcp_cluster: RunningCluster, one_process_engine: Engine, method: str, temperature: float
) -> None:
    """The draft model prefills the prompt itself: only the KV of the other one came with it."""
    prompt, draw = prompt_of(60, seed=5) * 2, {"temperature": temperature, "seed": 3}
    expected, _ = oracle(one_process_engine, prompt, SamplingParams(max_tokens=60, **draw))
    request = llm_pb2.GenerateRequest(
        model="tandem-demo",
        token_ids=llm_pb2.TokenIds(ids=prompt),
        sampling=llm_pb2.SamplingParams(
            max_tokens=60, repetition_penalty=1.0, top_p=1.0, ignore_eos=True, temperature=temperature, seed=3
        ),
        speculative=llm_pb2.Speculative(method=method),
    )

    def num_proposed() -> int:
        with grpc.insecure_channel(tcp_cluster.grpc) as channel:
            parts = list(llm_pb2_grpc.LLMServiceStub(channel).Generate(request, timeout=60))
        assert [token for part in parts for token in part.token_ids] == expected
        usage = parts[-1].usage
        assert usage.accepted_tokens <= usage.proposed_tokens
        return usage.proposed_tokens

    if method == "none" or (method, temperature) == ("ngram", 0.7):
        assert num_proposed() == 0 or method == "ngram"
    else:  # what does not pay at present, as measured on this machine, is proposed in a later answer
        eventually(lambda: num_proposed() > 0, 60.0, "tokens are proposed ahead")


def test_kv_bytes_really_move(
    service: llm_pb2_grpc.LLMServiceStub, cluster: RunningCluster, one_process_engine: Engine
) -> None:
    layout = one_process_engine.layout
    prompt = prompt_of(5 * BLOCK + 3, seed=99)
    _, last = generate(service, prompt, llm_pb2.SamplingParams(max_tokens=4, temperature=0))
    assert last.path.kind == llm_pb2.Path.KIND_REMOTE_PREFILL
    assert last.path.transport == ("shm" if "shm" in str(cluster.logs) else "tcp")
    assert last.path.transfer_bytes == 6 * layout.num_layers * layout.block_bytes


def test_one_token(service: llm_pb2_grpc.LLMServiceStub, one_process_engine: Engine) -> None:
    prompt = prompt_of(2 * BLOCK, seed=5)
    expected, _ = oracle(one_process_engine, prompt, SamplingParams(max_tokens=1, temperature=0))
    tokens, last = generate(service, prompt, llm_pb2.SamplingParams(max_tokens=1, temperature=0))
    assert tokens == expected
    assert last.finish_reason == llm_pb2.FINISH_REASON_LENGTH


def test_stop_on_the_first_token(service: llm_pb2_grpc.LLMServiceStub, one_process_engine: Engine) -> None:
    prompt = prompt_of(2 * BLOCK, seed=6)
    (first,), _ = oracle(one_process_engine, prompt, SamplingParams(max_tokens=1, temperature=0))
    sampling = llm_pb2.SamplingParams(max_tokens=8, temperature=0, stop_token_ids=[first])
    tokens, last = generate(service, prompt, sampling)
    assert tokens == [first]
    assert last.finish_reason == llm_pb2.FINISH_REASON_STOP
    assert last.text == ""


def test_a_repeated_prompt_is_cached_and_equal(service: llm_pb2_grpc.LLMServiceStub) -> None:
    prompt = prompt_of(10 * BLOCK + 1, seed=11)
    sampling = llm_pb2.SamplingParams(max_tokens=12, temperature=0)
    first, _ = generate(service, prompt, sampling)
    second, last = generate(service, prompt, sampling)
    assert first == second
    assert last.usage.cached_tokens == 10 * BLOCK


@pytest.mark.parametrize("first", [pytest.param(6 * BLOCK, marks=pytest.mark.long), 6 * BLOCK + 5])
@pytest.mark.parametrize("more", [1, BLOCK, 3 * BLOCK + 7])
def test_a_follow_up_turn_moves_only_the_blocks_that_decode_lacks(
    service: llm_pb2_grpc.LLMServiceStub, one_process_engine: Engine, first: int, more: int
) -> None:
    """Decode kept the first prompt and its own answer, but for the last token's KV."""
    answered, layout = 2 * BLOCK + 1, one_process_engine.layout
    prompt = prompt_of(first, seed=1000 * first + more)
    answer, _ = generate(service, prompt, llm_pb2.SamplingParams(max_tokens=answered, temperature=0, ignore_eos=True))
    assert len(answer) == answered
    prompt += answer + prompt_of(more, seed=more)
    expected, _ = oracle(one_process_engine, prompt, SamplingParams(max_tokens=20, temperature=0))
    tokens, last = generate(service, prompt, llm_pb2.SamplingParams(max_tokens=20, temperature=0, ignore_eos=True))
    assert tokens == expected
    held = (first + answered - 1) // BLOCK
    assert last.usage.cached_tokens == held * BLOCK
    lacking = -(-len(prompt) // BLOCK) - held
    assert last.path.transfer_bytes == lacking * layout.num_layers * layout.block_bytes


def test_a_prompts_logprobs_are_those_of_the_one_process_engine(
    service: llm_pb2_grpc.LLMServiceStub, one_process_engine: Engine
) -> None:
    """Cached on the second time, and computed all the same."""
    prompt = prompt_of(600, seed=31)
    one_process_engine.add(Request("oracle", prompt, SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=2)))
    expected = next(out[0].prompt_logprobs for _ in range(9) if (out := one_process_engine.step()))
    for _ in range(2):
        sampling = llm_pb2.SamplingParams(prompt_logprobs=2, max_tokens=0)
        request = llm_pb2.GenerateRequest(
            model="tandem-demo", token_ids=llm_pb2.TokenIds(ids=prompt), sampling=sampling
        )
        answer = service.GenerateUnary(llm_pb2.GenerateUnaryRequest(generate=request), timeout=60)
        found = answer.choices[0].prompt_logprobs
        assert answer.path.kind == llm_pb2.Path.KIND_REMOTE_PREFILL
        assert not answer.token_ids
        assert [one.token_id for one in found] == prompt[1:]
        assert [one.logprob for one in found] == pytest.approx([one.logprob for one in expected], abs=1e-4)
        assert [one.rank for one in found] == [one.rank for one in expected]
        assert [[top.token_id for top in one.top] for one in found] == [[i for i, _ in one.top] for one in expected]
