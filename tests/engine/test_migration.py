"""A sequence that goes on in another engine behind any of its tokens writes what one engine would have written."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.engine import Engine, EngineConfig, FinishReason, Request, SamplingParams, SequenceOutput, StepTime
from tandem.speculative import Speculative
from tests.engine.test_handoff import CopySink
from tests.engine.tiny import assert_idle, greedy, make_engine, prompt_of, run, tokens

PROMPT = 22
MANNERS = {
    "greedy": greedy(10),
    "seeded": SamplingParams(max_tokens=10, temperature=1.3, top_p=0.95, seed=11),
    "penalized": SamplingParams(
        max_tokens=10, temperature=0.9, seed=5, presence_penalty=1.5, frequency_penalty=0.7, repetition_penalty=1.4
    ),
    "stopped": SamplingParams(
        max_tokens=40, min_tokens=7, temperature=1.5, seed=8, stop_token_ids=frozenset(range(48))
    ),
}


@pytest.fixture(scope="module", params=["auto", "int8"])
def engines(request: pytest.FixtureRequest, llama: Path) -> list[Engine]:
    return [make_engine(llama, kv_cache_dtype=request.param) for _ in range(3)]


def going_on(whole: list[SequenceOutput], prompt: list[int], sampling: SamplingParams, written: int) -> Request:
    return Request("r", [*prompt, *tokens(whole)[:written]], sampling, num_prior_tokens=written)


def numbered(outputs: list[SequenceOutput]) -> list[tuple[int, int]]:
    return [(o.first_index + i, token.token_id) for o in outputs for i, token in enumerate(o.tokens)]


@pytest.mark.long
@pytest.mark.parametrize("sampling", MANNERS.values(), ids=MANNERS)
def test_behind_any_token_read_there_or_landed(engines: list[Engine], sampling: SamplingParams) -> None:
    first, source, target = engines
    prompt = prompt_of(PROMPT, 3)
    first.add(Request("r", prompt, sampling))
    whole = run(first)["r"]
    for written in range(1, len(tokens(whole))):
        request = going_on(whole, prompt, sampling, written)
        target.add(request)
        assert numbered(run(target)["r"]) == numbered(whole)[written:]
        assert landed(source, target, request) == numbered(whole)[written:]
    assert_idle(target)


def landed(source: Engine, target: Engine, request: Request) -> list[tuple[int, int]]:
    """Read by `source`, its KV copied to where `target` wants it, gone on there."""
    cached = target.reserve(request)
    assert cached is not None
    sink = CopySink.of(target, "r")
    assert len(sink.landing) == source._blocks.blocks_for(len(request.token_ids))
    source.add(request, sink=sink, first_block=cached // source.layout.block_size, prefill_only=True)
    (output,) = run(source)["r"]
    ended = target.join("r", output.tokens[0])
    rest = [ended] if ended else run(target)["r"]
    assert rest[-1].finish_reason is not None
    return numbered([output, *rest])


def test_the_end_comes_where_it_would_have_come(engines: list[Engine]) -> None:
    prompt = prompt_of(PROMPT, 3)
    engines[0].add(Request("r", [*prompt, *[5] * 9], greedy(10), num_prior_tokens=9))
    (output,) = run(engines[0])["r"]
    assert (output.first_index, output.finish_reason) == (9, FinishReason.LENGTH)


def test_its_blocks_are_for_the_answer_it_began_with(llama: Path) -> None:
    """Prompt 8 and answer 24 fill 8 blocks of 4: behind 20 tokens of it they still do."""
    engine = make_engine(llama, num_blocks=8)
    sampling = greedy(24)
    assert engine.reserve(Request("r", prompt_of(8, 1) + prompt_of(20, 2), sampling, num_prior_tokens=20)) == 0
    assert engine.stats().free_blocks == 0
    engine.abort("r")


@pytest.mark.parametrize("prior", [-1, 10, 23])
def test_more_prior_tokens_than_there_can_be_are_refused(engines: list[Engine], prior: int) -> None:
    with pytest.raises(ValueError, match="num_prior_tokens"):
        engines[0].add(Request("r", prompt_of(22, 1), greedy(10), num_prior_tokens=prior))


def test_the_null_engine_goes_on_too(demo_model: Path) -> None:
    config = EngineConfig(demo_model, "demo", num_blocks=64, null=StepTime(speedup=1e6))
    one, other = Engine(config), Engine(config)
    sampling = SamplingParams(max_tokens=12, seed=3)
    one.add(Request("r", prompt_of(30, 1), sampling))
    whole = run(one)["r"]
    request = going_on(whole, prompt_of(30, 1), sampling, 7)
    other.add(request)
    assert numbered(run(other)["r"]) == numbered(whole)[7:]


def test_a_speculating_engine_goes_on_too(llama: Path) -> None:
    """A prompt whose last token alone is left is prefilled, not guessed ahead of: the first token is one token."""
    ahead = Speculative("ngram", 3)
    plain, source = make_engine(llama), make_engine(llama, speculative=ahead)
    prompt = prompt_of(8, 3) * 3
    plain.add(Request("r", prompt, greedy(24)))
    whole = run(plain)["r"]
    for written in (5, 6, 7, 8):
        request = going_on(whole, prompt, greedy(24), written)
        for prefill_only in (True, False):
            source.add(request, prefill_only=prefill_only)
            outputs = run(source)["r"]
            expected = numbered(whole)[written : written + 1 if prefill_only else None]
            assert numbered(outputs) == expected
