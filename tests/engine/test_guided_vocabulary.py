"""Grammars over vocabularies of every kind: masks as wide as the logits, and answers that are the text asked for."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models

from tandem import grammar
from tandem.engine.sampling.guided import masks_of
from tandem.grammar import Grammars, Guide, InvalidGrammar
from tandem.vocabulary import Vocabulary
from tests.gateway.tiny_model import byte_level_tokenizer, write_model
from tests.vocabularies import ENDS, HOLE, MIDDLE, NAMES, TEXTS, rows_of, tokenizer_of

WORDS = byte_level_tokenizer()


def allowed_by(guide: Guide, vocab_size: int) -> list[int]:
    mask = np.zeros(-(-vocab_size // 32), np.int32)
    assert not guide.fill(mask.ctypes.data, mask.nbytes, [[]])
    return [i for i in range(32 * len(mask)) if mask[i // 32] >> i % 32 & 1]


@pytest.mark.parametrize("more", [-7, 0, 1, 64, 1000])
def test_masks_are_as_wide_as_the_logits(tmp_path: Path, more: int) -> None:
    vocab_size = WORDS.get_vocab_size() + more
    guide = Grammars(write_model(tmp_path), vocab_size).start(grammar.of_json_schema({"type": "object"}))
    allowed = allowed_by(guide, vocab_size)
    assert WORDS.token_to_id("{") in allowed
    assert max(allowed) < min(vocab_size, WORDS.get_vocab_size())
    assert not guide.follow(list(WORDS.encode("{}").ids))


class OneModel:
    """A model's folder with one of the tokenizers, and its grammars."""

    def __init__(self, folder: Path, tokenizer: Tokenizer, end: int, rows: int) -> None:
        folder.mkdir()
        tokenizer.save(str(folder / "tokenizer.json"))
        (folder / "config.json").write_text(json.dumps({"eos_token_id": end}), encoding="utf-8")
        self.vocabulary, self.end, self.rows = Vocabulary(tokenizer), end, rows
        self.grammars = Grammars(folder, rows)

    def walk(self, made: str, seed: int = 0, most: int = 400) -> str:
        """Returns the text of an answer whose tokens are drawn from those that are allowed, or are the forced ones."""
        guide, ids, draw = self.grammars.start(made), list[int](), random.Random(seed)
        while len(ids) < most:
            allowed = allowed_by(guide, self.rows)
            forced = guide.forced()
            assert not forced or forced[0] in allowed
            if allowed == [self.end]:
                break
            ids += forced if forced and draw.random() < 0.5 else [draw.choice([i for i in allowed if i != self.end])]
            assert not guide.follow(ids)
        assert self.vocabulary.special.isdisjoint(ids)
        assert all(map(self.vocabulary.token_bytes, ids)), "what says nothing was allowed"
        return b"".join(map(self.vocabulary.token_bytes, ids)).decode()


@pytest.fixture(scope="module", params=NAMES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> OneModel:
    name, folder = request.param, tmp_path_factory.mktemp("model")
    return OneModel(folder / name, tokenizer_of(name), ENDS[name], rows_of(name))


@pytest.mark.parametrize("text", TEXTS)
def test_the_text_asked_for_comes(model: OneModel, text: str) -> None:
    """No token that only looks like a part of the text is in it, whether what comes next is certain or not."""
    for seed in range(3):
        assert model.walk(grammar.of_choice([text]), seed) == text
        assert model.walk(grammar.of_choice([f"a{text}", f"b{text}"]), seed) in (f"a{text}", f"b{text}")


def test_json_and_calls_and_patterns_come(model: OneModel) -> None:
    schema = {"properties": {"city name": {"enum": ["New York", "🦜 é"]}}, "required": ["city name"]}
    schema |= {"type": "object", "additionalProperties": False}
    for seed in range(5):
        assert json.loads(model.walk(grammar.of_json_schema(schema), seed))["city name"] in ("New York", "🦜 é")
        (call,) = json.loads(model.walk(grammar.of_calls({"look up": schema}, 1), seed))
        assert call["name"] == "look up"
        assert model.walk(grammar.of_regex("🦜 é{2}"), seed) == "🦜 éé"
        model.walk(grammar.of_regex(r"(.|\n)*"), seed, most=60 if seed else 0)


def test_a_mark_is_the_special_token_and_its_text_is_not(tmp_path: Path) -> None:
    model = OneModel(tmp_path / "holed", tokenizer_of("holed"), 0, 4101)
    mark = MIDDLE["<|middle|>"]
    by_token = model.grammars.start(grammar.behind_thoughts(grammar.of_regex("a"), mark))
    assert {mark} < set(allowed_by(by_token, 4101))
    assert not by_token.follow([*model.vocabulary.spell("<|middle|>"), mark, *model.vocabulary.spell("a")])
    assert allowed_by(by_token, 4101) == [0]
    by_text = model.grammars.start(grammar.of_regex(r"<\|middle\|>"))
    assert not {mark, HOLE, HOLE + 1} & set(allowed_by(by_text, 4101))
    assert by_text.follow([mark])


def test_each_of_two_words_for_the_same_is_allowed(tmp_path: Path) -> None:
    model = OneModel(tmp_path / "holed", tokenizer_of("holed"), 0, 4101)
    both = {i for i in range(4101) if model.vocabulary.token_bytes(i) == b" the"}
    assert len(both) == 2
    assert both < set(allowed_by(model.grammars.start(grammar.of_regex(" the( |n)")), 4101))


def test_a_word_of_which_llguidance_panics_is_never_allowed(tmp_path: Path) -> None:
    words = {"</s>": 0, "a": 1, "a" * 1001: 2, "a" * 5000: 3}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="</s>"))
    tokenizer.decoder = decoders.Fuse()
    model = OneModel(tmp_path / "long", tokenizer, 0, 4)
    assert allowed_by(model.grammars.start(grammar.of_regex("a*")), 4) == [0, 1]


@pytest.mark.parametrize("regex", ["🦜", "a🦜", "[ab]🦜"])
def test_what_the_vocabulary_cannot_say_is_an_error_and_no_answer(tmp_path: Path, regex: str) -> None:
    tokenizer = Tokenizer(models.BPE({"</s>": 0, "a": 1, "b": 2}, [], unk_token="</s>"))
    tokenizer.decoder = decoders.Fuse()
    model = OneModel(tmp_path / "short", tokenizer, 0, 3)
    guide, mask = model.grammars.start(grammar.of_regex(regex)), np.zeros(1, np.int32)
    wrong = guide.fill(mask.ctypes.data, 4, [[]]) or guide.follow([1]) or guide.fill(mask.ctypes.data, 4, [[]])
    assert wrong == "the model's vocabulary has no token for what must come next"
    said = [] if regex == "🦜" else [1]
    row: Any = SimpleNamespace(guide=model.grammars.start(grammar.of_regex(regex)), token_ids=said, answer_start=0)
    row.ahead, row.error = [], None
    masks_of([row], 3)
    assert row.error == f"the answer cannot follow its grammar: {wrong}"
    assert model.walk(grammar.of_regex("🦜|ab")) == "ab"


def test_a_model_that_cannot_end_is_no_model_for_grammars(tmp_path: Path) -> None:
    model = OneModel(tmp_path / "endless", tokenizer_of("ours"), 4096, 4096)
    with pytest.raises(InvalidGrammar, match="no end-of-text token"):
        model.grammars.start(grammar.of_regex("a"))
