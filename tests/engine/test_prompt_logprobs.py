"""Log-probabilities of a prompt's own tokens: transformers', however the prompt is cut, cached or interrupted."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from transformers import PreTrainedModel

from tandem.engine import Engine, Request, SampledToken
from tests.engine.test_handoff import CopySink, prefill
from tests.engine.tiny import Families, assert_idle, greedy, make_engine, prompt_of, run

PROMPT = prompt_of(41, seed=3)
ASKED = greedy(3, prompt_logprobs=3)


@pytest.fixture(scope="module")
def expected(family: Families) -> torch.Tensor:
    model: PreTrainedModel = family("llama3")[0]
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([PROMPT])).logits[0]
    return logits.log_softmax(dim=-1)


@pytest.fixture
def engine(family: Families) -> Engine:
    return make_engine(family("llama3")[1])


def assert_right(found: Sequence[SampledToken], expected: torch.Tensor) -> None:
    assert [token.token_id for token in found] == PROMPT[1:]
    for row, token in zip(expected, found, strict=False):
        best = row.topk(3)
        assert token.logprob == pytest.approx(row[token.token_id].item(), abs=1e-4)
        assert token.rank == int((row >= row[token.token_id]).sum())
        assert [token_id for token_id, _ in token.top] == best.indices.tolist()
        assert [logprob for _, logprob in token.top] == pytest.approx(best.values.tolist(), abs=1e-4)


def test_they_are_transformers(engine: Engine, expected: torch.Tensor) -> None:
    engine.add(Request("a", PROMPT, ASKED))
    outputs = run(engine)["a"]
    assert_right(outputs[0].prompt_logprobs, expected)
    assert not any(output.prompt_logprobs for output in outputs[1:])


def test_a_cached_prompt_is_computed_again_and_shared_all_the_same(engine: Engine, expected: torch.Tensor) -> None:
    engine.add(Request("a", PROMPT, greedy(3)))
    plain = run(engine)["a"]
    for name in ("b", "c"):
        engine.add(Request(name, PROMPT, ASKED))
    engine.add(Request("d", PROMPT, greedy(3)))
    outputs = run(engine)
    for name in ("b", "c"):
        assert_right(outputs[name][0].prompt_logprobs, expected)
        assert outputs[name][0].num_cached_tokens == 0
    assert outputs["d"][0].num_cached_tokens > 0
    assert all([o.tokens for o in outputs[name]] == [o.tokens for o in plain] for name in "bcd")
    assert_idle(engine)


def test_a_prefill_reports_them_though_decode_holds_part_of_the_prompt(
    family: Families, engine: Engine, expected: torch.Tensor
) -> None:
    source = make_engine(family("llama3")[1])
    engine.add(Request("before", PROMPT[:20], greedy(1)))
    run(engine)
    for name in ("cold", "cached"):
        request = Request(name, PROMPT, ASKED)
        cached = engine.reserve(request)
        assert cached
        output = prefill(source, request, CopySink.of(engine, name), cached // 4)
        assert_right(output.prompt_logprobs, expected)
        engine.join(name, output.tokens[0])
        assert not any(output.prompt_logprobs for output in run(engine)[name])


def test_a_prompt_interrupted_while_it_is_prefilled(family: Families, expected: torch.Tensor) -> None:
    engine = make_engine(family("llama3")[1], num_blocks=14, max_prefill_beside_decode=4)
    engine.add(Request("first", prompt_of(10), greedy(30)))
    engine.step()
    engine.add(Request("a", PROMPT, ASKED))
    engine.step()
    assert engine.stats().num_running == 2
    while not engine.stats().num_waiting:
        assert not [output for output in engine.step() if output.request_id == "a"]  # the first one grows before
    outputs = run(engine)
    assert_right(outputs["a"][0].prompt_logprobs, expected)


def test_one_that_another_engine_has_begun_has_reported_them(engine: Engine) -> None:
    engine.add(Request("a", PROMPT, ASKED, num_prior_tokens=1))
    assert not any(output.prompt_logprobs for output in run(engine)["a"])


def test_named_tokens_are_reported_instead_of_the_likeliest(engine: Engine) -> None:
    named = (5, 90, 7)
    engine.add(Request("a", PROMPT, greedy(2, logprobs=96)))
    engine.add(Request("b", PROMPT, greedy(2, logprobs=0, logprob_token_ids=named)))
    outputs = run(engine)
    for all_of_them, token in zip(outputs["a"], outputs["b"], strict=True):
        likely = dict(all_of_them.tokens[0].top)
        assert [token_id for token_id, _ in token.tokens[0].top] == list(named)
        assert [logprob for _, logprob in token.tokens[0].top] == pytest.approx([likely[i] for i in named], abs=1e-5)
