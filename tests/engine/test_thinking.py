"""Thoughts end when their budget is used up, wherever the answer is written, and nothing else changes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from tandem import grammar
from tandem.engine import Engine, SamplingParams
from tandem.speculative import Speculative
from tandem.vocabulary import load_tokenizer
from tests.engine.test_guided import DEMO, END, engine, prompt, run

__all__ = ["engine"]
BEGIN_MARK, END_MARK = (7, 8), (77, 78, 79)
FREE = SamplingParams(max_tokens=24, temperature=0.0, stop_token_ids=END)


def budget(tokens: int, **fields: object) -> SamplingParams:
    return replace(FREE, thinking_token_budget=tokens, thinking_end_token_ids=END_MARK, **fields)


def tokens_of(engine: Engine, asked: SamplingParams, at: int = 1, **fields: object) -> list[int]:
    return run(engine, {"r": (prompt(at), asked)}, **fields)["r"][0]


@pytest.mark.long
@pytest.mark.parametrize("most", [0, 1, 5])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_mark_comes_when_the_budget_is_used_up(engine: Engine, most: int, temperature: float) -> None:
    """Before it the answer is as it would be, and behind it as if the mark had been the model's own."""
    asked = budget(most, temperature=temperature, seed=3)
    free = tokens_of(engine, replace(FREE, temperature=temperature, seed=3))
    found = tokens_of(engine, asked)
    assert found[:most] == free[:most]
    assert tuple(found[most : most + 3]) == END_MARK
    own = run(engine, {"r": (prompt(1) + found[: most + 3], replace(FREE, temperature=temperature, seed=3))},
              num_prior_tokens=most + 3)["r"][0]  # fmt: skip
    assert found[most + 3 :] == own
    assert END_MARK[0] not in own


def test_an_answer_goes_on_elsewhere_behind_any_of_its_tokens(engine: Engine) -> None:
    asked = budget(6)
    whole = tokens_of(engine, asked)
    for written in range(1, len(whole)):
        going_on = {"r": (prompt(1) + whole[:written], asked)}
        assert run(engine, going_on, num_prior_tokens=written)["r"][0] == whole[written:]


@pytest.mark.long
def test_tokens_proposed_ahead_and_a_batch_change_nothing(engine: Engine) -> None:
    asked = {str(n): (prompt(n), budget(n, temperature=n % 2, seed=n)) for n in range(8)}
    alone = {name: run(engine, {name: one})[name] for name, one in asked.items()}
    assert run(engine, asked) == alone
    assert run(engine, asked, speculative=Speculative("ngram", 6)) == alone


def test_thoughts_that_end_by_themselves_are_left_alone(engine: Engine) -> None:
    free = tokens_of(engine, FREE)
    assert tokens_of(engine, replace(budget(10), thinking_end_token_ids=(free[4],))) == free


def test_an_answer_without_thoughts_is_left_alone(engine: Engine) -> None:
    free = tokens_of(engine, FREE)
    assert tokens_of(engine, budget(5, thinking_begin_token_ids=BEGIN_MARK)) == free
    at_once = tokens_of(engine, budget(2, thinking_begin_token_ids=(free[0],)))
    assert at_once[:6] == [*free[:3], *END_MARK]


def test_a_grammar_behind_the_thoughts(engine: Engine) -> None:
    """The mark is of the same text for both."""
    tokenizer = load_tokenizer(DEMO)
    mark = tuple(tokenizer.encode("</think>", add_special_tokens=False).ids)
    made = grammar.behind_thoughts(grammar.of_choice(["red fox", "blue"]), "</think>")
    found = tokens_of(engine, replace(budget(9), grammar=made, thinking_end_token_ids=mark, max_tokens=40))
    assert tuple(found[9 : 9 + len(mark)]) == mark
    assert tokenizer.decode(found[9 + len(mark) :]).strip() in ("red fox", "blue")


class Bytes:
    """A vocabulary of bytes, the end of a text, and a special token."""

    eos_token_id, bos_token_id, special_token_ids = 256, None, (256, 257)
    tokens = (*(bytes([i]) for i in range(256)), b"<end>", b"[/THINK]")

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


@pytest.mark.parametrize(("mark", "ends"), [("[/THINK]", [*b"[/THINK]"]), (257, [257])])
def test_the_mark_before_a_grammar_may_be_a_special_token(mark: str | int, ends: list[int]) -> None:
    made = grammar.behind_thoughts(grammar.of_choice(["red", "blue"]), mark)
    matcher = LLMatcher(LLTokenizer(TokenizerWrapper(Bytes())), made, log_level=0)
    answer = [*b"hm, [\n", *ends, *b" red"]
    assert matcher.try_consume_tokens(answer) == len(answer)
    assert matcher.is_accepting()
