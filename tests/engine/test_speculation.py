"""Speculative decoding gives the tokens of plain decoding, whatever is asked for and however sequences come and go."""

from __future__ import annotations

import inspect
import textwrap
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from tandem.engine import Engine, EngineConfig, Request, SampledToken, SamplingParams, SequenceOutput
from tandem.engine.scheduling.sequence import BlockHashes, Sequence
from tandem.engine.speculation import NgramProposer
from tandem.engine.speculation.proposer import Wanted
from tandem.speculative import Speculative
from tests.engine.tiny import Families, assert_idle, generate, greedy, make_engine, prompt_of, run, sampled, tokens
from tests.marks import long_but

DEMO = Path(__file__).parents[2] / "models" / "demo"
PLAIN = Speculative("none")


def still() -> float:
    """A clock by which nothing takes time, so that every proposal pays."""
    return 0.0


@pytest.fixture(scope="module")
def demo() -> Engine:
    config = EngineConfig(
        model_path=DEMO / "target", model_name="demo", dtype="float32", num_blocks=400, max_num_batched_tokens=96,
        speculative_model=DEMO / "draft",
    )  # fmt: skip
    return Engine(config, now=still)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Real code, so that proposals are often right, and often wrong."""
    tokenizer = Tokenizer.from_file(str(DEMO / "target" / "tokenizer.json"))
    ids: list[int] = tokenizer.encode(inspect.getsource(textwrap)).ids
    return [ids[start : start + length] for start, length in ((0, 150), (400, 40), (900, 17), (1500, 70))]


def answers(
    engine: Engine, prompts: list[list[int]], sampling: SamplingParams, speculative: Speculative
) -> dict[str, list[SequenceOutput]]:
    """All at once: prompts are prefilled in chunks while others decode."""
    for number, prompt in enumerate(prompts):
        params = replace(sampling, seed=number, max_tokens=sampling.max_tokens + 7 * number)
        engine.add(Request(str(number), prompt, params, speculative=speculative))
    outputs = run(engine)
    assert_idle(engine)
    return outputs


SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.8, "top_p": 0.95, "top_k": 50},
    "hot": {"temperature": 1.5, "min_p": 0.02},
    "penalties": {"temperature": 0.0, "repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.2},
    "sampled penalties": {"temperature": 0.7, "repetition_penalty": 1.1, "logit_bias": {17: 2.0, 30: -3.0}},
    "logprobs": {"temperature": 0.5, "logprobs": 3},
}


@pytest.mark.parametrize("method", ["ngram", "draft"])
@pytest.mark.parametrize("sampling", long_but(("hot",), SAMPLINGS))
def test_tokens_equal_plain_decodings(demo: Engine, prompts: list[list[int]], sampling: str, method: str) -> None:
    params, before = SamplingParams(max_tokens=40, **SAMPLINGS[sampling]), demo.stats()
    plain = answers(demo, prompts, params, PLAIN)
    between = demo.stats()
    assert between.num_proposed_tokens == before.num_proposed_tokens
    ahead = answers(demo, prompts, params, Speculative(method, 5))
    for name, outputs in plain.items():
        assert_same(sampled(ahead[name]), sampled(outputs))
        assert [o.finish_reason for o in ahead[name] if o.finished] == [o.finish_reason for o in outputs if o.finished]
        assert len(ahead[name]) == len(outputs) - ahead[name][-1].num_accepted_tokens
    after = demo.stats()
    proposed = after.num_proposed_tokens - between.num_proposed_tokens
    assert 0 < after.num_accepted_tokens - between.num_accepted_tokens < proposed
    assert proposed == sum(outputs[-1].num_proposed_tokens for outputs in ahead.values())
    assert after.num_written_tokens - between.num_written_tokens == sum(len(tokens(o)) - 1 for o in plain.values())
    assert after.num_prefilled_tokens - between.num_prefilled_tokens <= sum(map(len, prompts))


def assert_same(tokens: list[SampledToken], expected: list[SampledToken]) -> None:
    assert [token.token_id for token in tokens] == [token.token_id for token in expected]
    for token, other in zip(tokens, expected, strict=True):
        assert token.logprob == (None if other.logprob is None else pytest.approx(other.logprob, abs=1e-4))
        assert [i for i, _ in token.top] == [i for i, _ in other.top]


@pytest.mark.long
@pytest.mark.parametrize("method", ["ngram", "draft"])
def test_stops_and_lengths(demo: Engine, prompts: list[list[int]], method: str) -> None:
    """A stop token in the middle of what was accepted ends the answer there; before min_tokens it is never drawn."""
    plain = generate(demo, prompts[0], greedy(40))
    for length in range(1, 12):
        assert generate_ahead(demo, prompts[0], greedy(length), method) == plain[:length]
    for stop in sorted(set(plain))[:8]:
        params = greedy(40, stop_token_ids=frozenset({stop}))
        assert generate_ahead(demo, prompts[0], params, method) == plain[: plain.index(stop) + 1]
        held = replace(params, min_tokens=25)
        assert generate_ahead(demo, prompts[0], held, method) == generate(demo, prompts[0], held)


def generate_ahead(engine: Engine, prompt: list[int], sampling: SamplingParams, method: str) -> list[int]:
    engine.add(Request("ahead", prompt, sampling, speculative=Speculative(method, 6)))
    return tokens(run(engine)["ahead"])


def test_up_to_the_models_last_position(llama: Path) -> None:
    plain, ahead = make_engine(llama), make_engine(llama, now=still, speculative_model=llama)
    for length in (110, 126, 127):
        expected = generate(plain, prompt_of(length, seed=length), greedy(40))
        assert len(expected) == 128 - length
        assert generate_ahead(ahead, prompt_of(length, seed=length), greedy(40), "draft") == expected


def test_a_draft_that_is_the_model_itself_is_always_right(llama: Path) -> None:
    engine = make_engine(llama, now=still, speculative_model=llama, speculative=Speculative("draft", 4))
    generate(engine, prompt_of(14), greedy(2))  # an engine's first step is plain
    for sampling in (greedy(31), SamplingParams(31, temperature=1.0, seed=5)):
        engine.add(Request("r", prompt_of(14), sampling))
        outputs = run(engine)["r"]
        assert [len(output.tokens) for output in outputs] == [1] + [5] * 6
        assert (outputs[-1].num_proposed_tokens, outputs[-1].num_accepted_tokens) == (24, 24)


def test_long_prompts_are_drafted_in_chunks() -> None:
    """With the compiled kernels, too, where the machine can have them."""
    config = EngineConfig(
        model_path=DEMO / "target", model_name="demo", max_num_batched_tokens=64, num_blocks=200,
        speculative_model=DEMO / "draft", speculative=Speculative("draft", 4),
    )  # fmt: skip
    engine = Engine(config, now=still)
    generate(engine, [3], greedy(2))  # an engine's first step is plain
    for number in range(4):
        engine.add(Request(str(number), [7 + number] * 150, greedy(12)))
    outputs = run(engine)
    assert all(len(tokens(outputs[str(number)])) == 12 for number in range(4))
    assert engine.stats().num_proposed_tokens > 0


def test_a_shared_prompt_is_drafted_once(llama: Path) -> None:
    engine = make_engine(llama, now=still, speculative_model=llama, speculative=Speculative("draft", 3))
    draft = engine._speculator._proposers["draft"]
    read: list[int] = []
    forward = draft._forward  # type: ignore[attr-defined]
    draft._forward = Counting(forward, read)  # type: ignore[attr-defined]
    expected = generate(engine, prompt_of(40), greedy(9))
    assert sum(read) > 40
    read.clear()
    assert generate(engine, prompt_of(40), greedy(9)) == expected
    assert sum(read) < 20


class Counting:
    def __init__(self, forward: Any, read: list[int]) -> None:
        self._forward, self._read, self.logits = forward, read, forward.logits

    def __call__(self, step: Any) -> Any:
        self._read.append(len(step.input_ids))
        return self._forward(step)


def test_proposals_take_no_block_that_another_needs(llama: Path) -> None:
    """With blocks for the two sequences alone, what is proposed fits into the rest of their last blocks, or is not."""
    plain = make_engine(llama)
    tight = make_engine(llama, num_blocks=8, now=still, speculative_model=llama, speculative=Speculative("draft", 4))
    prompts = [prompt_of(7, seed) for seed in (1, 2)]
    expected = [generate(plain, prompt, greedy(9)) for prompt in prompts]
    for number, prompt in enumerate(prompts):
        tight.add(Request(str(number), prompt, greedy(9)))
    outputs = run(tight)
    assert [tokens(outputs[str(n)]) for n in range(2)] == expected
    assert_idle(tight)


def test_a_request_chooses_for_itself(llama: Path) -> None:
    engine = make_engine(llama, now=still, speculative=Speculative("ngram", 2))
    loop = [5, 6, 7] * 8
    for number, speculative in enumerate((None, PLAIN, Speculative("ngram", 0), Speculative("ngram", 16))):
        engine.add(Request(str(number), loop, greedy(20), speculative=speculative))
    outputs = run(engine)
    proposed = [outputs[str(number)][-1].num_proposed_tokens for number in range(4)]
    assert len({tuple(tokens(outputs[str(number)])) for number in range(4)}) == 1
    assert proposed[0] > 0
    assert proposed[1:3] == [0, 0]
    assert proposed[3] > proposed[0]


def test_it_goes_on_while_a_prompt_is_prefilled_beside(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.engine.speculation.speculator.PLAIN_EVERY", 3)
    engine = make_engine(llama, now=still, speculative=Speculative("ngram", 2), max_prefill_beside_decode=1)
    engine.add(Request("answer", [5, 6, 7] * 8, greedy(220)))
    for _ in range(4):
        engine.step()
    engine.add(Request("prompt", list(range(2, 82)), greedy(1)))
    for _ in range(70):
        engine.step()
    stats = engine.stats()
    assert stats.queued_tokens > 0
    assert stats.num_proposed_tokens > 3 * 2 * 2


@pytest.mark.parametrize(
    ("speculative", "message"),
    [
        (Speculative("draft"), "speculative.method: 'draft' is not one of none, ngram"),
        (Speculative("oracle"), "speculative.method: 'oracle' is not one of none, ngram"),
        (Speculative("ngram", 17), "speculative.num_tokens: 17 is not between 0 and 16"),
        (Speculative("ngram", -1), "speculative.num_tokens: -1 is not between 0 and 16"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(llama: Path, speculative: Speculative, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_engine(llama, speculative=speculative)
    with pytest.raises(ValueError, match=message):
        make_engine(llama).add(Request("r", [3], greedy(3), speculative=speculative))


def test_drafts_that_cannot_work(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="speculative_model: its vocabulary has 4096 tokens, not 96"):
        make_engine(llama, speculative_model=DEMO / "draft")
    with pytest.raises(ValueError, match=r"speculative_model: .*config.json does not exist"):
        make_engine(llama, speculative_model=tmp_path)


def test_the_budget_holds_both_caches(llama: Path) -> None:
    alone = make_engine(llama, num_blocks=None, kv_budget_bytes=1 << 20)
    both = make_engine(llama, num_blocks=None, kv_budget_bytes=1 << 20, speculative_model=llama)
    assert both.stats().num_blocks == alone.stats().num_blocks // 2


@pytest.mark.long
def test_families_draft_for_each_other(llama: Path, family: Families) -> None:
    engine = make_engine(llama, now=still, speculative_model=family("qwen3")[1])
    for seed in range(3):
        expected = generate(engine, prompt_of(20, seed), greedy(30))
        assert generate_ahead(engine, prompt_of(20, seed), greedy(30), "draft") == expected


def sequence(ids: list[int] | None = None) -> Sequence:
    return Sequence("r", (0, 0), greedy(9), array("q", ids or [1]), 1, BlockHashes(b"", 4))


# --- what followed before ---


@pytest.mark.parametrize(
    ("ids", "most", "expected"),
    [
        ([1, 2, 3, 4, 9, 1, 2], 2, [3, 4]),
        ([1, 2, 3, 4, 9, 1, 2], 9, [3, 4, 9, 1, 2, 3, 4, 9, 1]),
        ([1, 2, 3, 7, 2, 4, 1, 2], 1, [3]),  # the longest match, not the last one
        ([1, 2, 3, 1, 2, 4, 1, 2], 1, [4]),  # of equal ones the last
        ([5, 5, 5], 3, [5, 5, 5]),
        ([1, 2, 3, 2], 3, []),  # one token is too little
        ([1, 2, 3], 3, []),
        ([1], 3, []),
    ],
)
def test_lookup(ids: list[int], most: int, expected: list[int]) -> None:
    seq = sequence(ids)
    NgramProposer().propose([Wanted(seq, most)])
    assert seq.proposed.tolist() == expected
