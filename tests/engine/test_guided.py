"""Answers that follow a grammar: always, whatever else is asked for, and exactly as by a mask made token by token."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher

from benchmarks.structured import check_schemas
from tandem import grammar
from tandem.engine import Engine, EngineConfig, FinishReason, Request, SamplingParams
from tandem.engine.scheduling.scheduler import Scheduled
from tandem.grammar import Grammars, InvalidGrammar
from tandem.speculative import Speculative
from tandem.vocabulary import Vocabulary, load_tokenizer

DEMO = Path(__file__).parents[2] / "models" / "demo" / "target"
VOCAB = 4096
END = frozenset({0})
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "bc", "def"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
Prompts = dict[str, tuple[list[int], SamplingParams]]


@pytest.fixture(scope="module")
def engine() -> Engine:
    config = EngineConfig(
        DEMO, "demo", dtype="float32", num_blocks=1024, kv_budget_bytes=None, max_num_seqs=64, num_threads=1
    )
    return Engine(config)


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return Vocabulary(load_tokenizer(DEMO))


def run(engine: Engine, prompts: Prompts, **fields: Any) -> dict[str, tuple[list[int], FinishReason]]:
    for name, (prompt, sampling) in prompts.items():
        engine.add(Request(name, prompt, sampling, **fields))
    tokens: dict[str, list[int]] = {name: [] for name in prompts}
    reasons: dict[str, FinishReason] = {}
    while len(reasons) < len(prompts):
        for output in engine.step():
            assert output.error is None, output.error
            tokens[output.request_id] += [token.token_id for token in output.tokens]
            if output.finish_reason is not None:
                reasons[output.request_id] = output.finish_reason
    engine.check_integrity()
    return {name: (tokens[name], reasons[name]) for name in prompts}


def prompt(seed: int) -> list[int]:
    return random.Random(seed).choices(range(1, VOCAB), k=9)


def text_of(vocabulary: Vocabulary, tokens: list[int]) -> str:
    return b"".join(vocabulary.token_bytes(t) for t in tokens if t not in END).decode()


def guided(made: str, **fields: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 60, "temperature": 0.0, "stop_token_ids": END, "grammar": made, **fields})


def test_every_answer_is_valid_or_the_beginning_of_a_valid_one(engine: Engine) -> None:
    """Some of the thousand that `python -m benchmarks.structured schemas 1000` goes through."""
    found = list(check_schemas(engine, 32))
    assert [problem for _, _, problem in found if problem] == []
    assert sum(ended for _, ended, _ in found) > 20


@pytest.mark.long
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_answer_goes_on_elsewhere_behind_any_of_its_tokens(engine: Engine, temperature: float) -> None:
    made = guided(grammar.of_json_schema(PERSON), temperature=temperature, seed=4)
    ((whole, reason),) = run(engine, {"r": (prompt(3), made)}).values()
    assert reason is FinishReason.STOP
    for written in range(1, len(whole), 3):
        going_on = {"r": (prompt(3) + whole[:written], made)}
        assert run(engine, going_on, num_prior_tokens=written)["r"] == (whole[written:], reason)


def test_an_answer_that_is_cut_is_the_beginning_of_a_valid_one(engine: Engine) -> None:
    made = grammar.of_json_schema(PERSON)
    ((tokens, reason),) = run(engine, {"r": (prompt(1), guided(made, max_tokens=7))}).values()
    assert reason is FinishReason.LENGTH
    matcher = Grammars(DEMO, VOCAB).compile(made).deep_copy()
    assert matcher.consume_tokens(tokens)
    assert not matcher.is_accepting()


def test_greedy_equals_masks_made_anew_for_every_token(engine: Engine) -> None:
    """The reference reads the whole answer anew each time, and has the engine choose among what may come next."""
    made = grammar.of_json_schema(PERSON)
    ((tokens, _),) = run(engine, {"r": (prompt(2), guided(made))}).values()
    compiled: LLMatcher = Grammars(DEMO, VOCAB).compile(made)
    for index, token in enumerate(tokens[:10]):
        matcher = compiled.deep_copy()
        assert matcher.consume_tokens(tokens[:index])
        allowed = frozenset(t for t, bias in enumerate(matcher.compute_logit_bias()[:VOCAB]) if bias)
        one = SamplingParams(max_tokens=1, temperature=0.0, allowed_token_ids=allowed, stop_token_ids=END)
        (((chosen,), _),) = run(engine, {"one": (prompt(2) + tokens[:index], one)}).values()
        assert chosen == token


def test_a_batch_gives_everyone_what_they_get_alone(engine: Engine) -> None:
    """Free answers, guided ones, greedy and seeded: each as alone, with tokens proposed ahead or not."""
    made = grammar.of_json_schema(PERSON), grammar.of_choice(["red fox", "red dog", "blue"]), ""
    asked = {str(n): (prompt(n), guided(made[n % 3], temperature=n % 2, seed=n, max_tokens=20)) for n in range(6)}
    alone = {name: run(engine, {name: one})[name] for name, one in asked.items()}
    assert run(engine, asked) == alone
    assert run(engine, asked, speculative=Speculative("ngram", 4)) == alone


@pytest.mark.long
def test_what_has_to_come_is_computed_at_once(engine: Engine) -> None:
    """The same answers as without, greedy and seeded, in a batch with free ones, in fewer steps."""
    config = EngineConfig(
        DEMO, "demo", dtype="float32", num_blocks=1024, kv_budget_bytes=None, num_threads=1, jump_forward=False
    )
    names = ["family_name", "year_of_birth", "postal_code"]
    wordy = {"type": "object", "properties": {name: {"type": "null"} for name in names}, "required": names}
    made = (
        grammar.of_json_schema({**wordy, "additionalProperties": False}),
        grammar.of_choice(["a red fox", "blue"]),
        "",
    )
    asked = {
        str(n): (prompt(n), guided(made[n % 3], temperature=n % 2, seed=n, logprobs=n % 2 or None)) for n in range(9)
    }
    slow, before = Engine(config), engine.stats()
    assert run(engine, asked) == run(slow, asked)
    accepted = engine.stats().num_accepted_tokens - before.num_accepted_tokens
    assert accepted == engine.stats().num_proposed_tokens - before.num_proposed_tokens > 60
    assert slow.stats().num_proposed_tokens == 0


def test_steps_stay_within_their_budget_however_much_is_certain(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(
        EngineConfig(
            DEMO, "demo", dtype="float32", num_blocks=256, kv_budget_bytes=None, num_threads=1,
            max_num_batched_tokens=24,
        )
    )  # fmt: skip
    steps: list[int] = []
    execute = engine._runner.execute

    def counted(batch: list[Scheduled]) -> Any:
        steps.append(sum(item.num_tokens for item in batch))
        return execute(batch)

    monkeypatch.setattr(engine._runner, "execute", counted)
    made = grammar.of_choice(["the quick brown fox jumps over the lazy dog"])
    run(engine, {str(n): (prompt(n), guided(made)) for n in range(4)})
    assert engine.stats().num_accepted_tokens > 8
    assert max(steps) <= 24


def test_the_grammar_goes_before_everything_else(engine: Engine, vocabulary: Vocabulary) -> None:
    made = grammar.of_choice(["red", "blue"])
    others: list[dict[str, Any]] = [
        {"min_tokens": 30, "max_tokens": 40},
        {"allowed_token_ids": frozenset({7, 8})},
        {"logit_bias": dict.fromkeys(range(50), -100.0)},
        {"repetition_penalty": 5.0, "temperature": 1.0},
    ]
    asked = {str(n): (prompt(n), guided(made, **other)) for n, other in enumerate(others)}
    for tokens, reason in run(engine, asked).values():
        assert text_of(vocabulary, tokens) in ("red", "blue")
        assert reason is FinishReason.STOP


@pytest.mark.parametrize(
    ("made", "pattern"),
    [
        (grammar.of_regex(r"[a-f]{3}-\d{2,4}"), r"[a-f]{3}-\d{2,4}"),
        (grammar.of_grammar('start: "yes" | "no" ", " REASON\nREASON: /[a-z]{2,5}/'), r"yes|no, [a-z]{2,5}"),
        (grammar.of_grammar('root ::= "a" num\nnum ::= [0-9] [0-9]'), r"a\d\d"),
        (
            grammar.of_tags([{"begin": "<f>", "schema": {"enum": [1, 22]}, "end": "</f>"}], ["<f"]),
            r"[^<]*(<f>(1|22)</f>[^<]*)*|(?s:.*)",
        ),
    ],
)
def test_every_kind(engine: Engine, vocabulary: Vocabulary, made: str, pattern: str) -> None:
    grammar.check(made)
    asked = {str(n): (prompt(n), guided(made, temperature=1.0, seed=n, max_tokens=40)) for n in range(6)}
    answers = run(engine, asked).values()
    ended = [text_of(vocabulary, tokens) for tokens, reason in answers if reason is FinishReason.STOP]
    assert all(re.fullmatch(pattern, text) for text in ended)


def test_compiled_grammars_are_kept_but_not_all() -> None:
    grammars = Grammars(DEMO, VOCAB)
    first = grammars.compile(grammar.of_choice(["0"]))
    assert grammars.compile(grammar.of_choice(["0"])) is first
    for n in range(1, 70):
        grammars.compile(grammar.of_choice([str(n)]))
    assert grammars.compile(grammar.of_choice(["0"])) is not first


def test_what_cannot_be_compiled_is_named(engine: Engine) -> None:
    with pytest.raises(ValueError, match=r"grammar: .*unknown name"):
        engine.add(Request("r", [5], guided("start: nothing")))
    assert not engine.has_work()
    with pytest.raises(InvalidGrammar, match="intger"):
        grammar.check(grammar.of_json_schema({"type": "intger"}))


def test_a_grammar_that_is_too_large_is_refused() -> None:
    with pytest.raises(InvalidGrammar):
        grammar.check(grammar.of_regex("|".join(f"[a-z]{{{n},900}}[0-9]{{{n},900}}" for n in range(1, 2000))))
