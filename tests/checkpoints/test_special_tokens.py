"""Special tokens and end tokens, of whichever file of a model names them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tandem.checkpoints import end_tokens, special_tokens

END = "<|endoftext|>"
DETAILS = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
DECODER = {"0": {"content": END, "special": True, **DETAILS}}


def write(folder: Path, demo_model: Path, **files: Any) -> Path:
    """Writes the demo model's tokenizer, and `files` as JSON beside it."""
    folder.mkdir()
    shutil.copy(demo_model / "tokenizer.json", folder)
    for name, said in files.items():
        (folder / f"{name}.json").write_text(json.dumps(said), encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config": {"bos_token": "<s>", "eos_token": END, "image_token": "<img>"}},
        {"tokenizer_config": {"eos_token": {"__type": "AddedToken", "content": "</s>", **DETAILS}}},
        {"tokenizer_config": {"eos_token": END, "extra_special_tokens": {"image_token": "<i>", "boi_token": "<b>"}}},
        {"tokenizer_config": {"eos_token": END}, "special_tokens_map": {"eos_token": "</s>", "bos_token": "<s>"}},
        {"tokenizer_config": {"eos_token": END}, "special_tokens_map": {"eos_token": {"content": "</s>", **DETAILS}}},
        {"tokenizer_config": {"eos_token": END, "added_tokens_decoder": DECODER}, "special_tokens_map": {}},
        {"tokenizer_config": {"eos_token": None, "add_bos_token": True, "bos_token": "<s>"}},
        {"tokenizer_config": {}, "special_tokens_map": {"bos_token": "<s>", "additional_special_tokens": ["<x>"]}},
    ],
)  # fmt: skip
def test_special_tokens_are_those_that_transformers_finds(tmp_path: Path, demo_model: Path, files: Any) -> None:
    from transformers import AutoTokenizer

    folder = write(tmp_path / "model", demo_model, **files)
    expected = AutoTokenizer.from_pretrained(folder).special_tokens_map
    assert special_tokens(folder) == expected


def ids(demo_model: Path) -> dict[str, int]:
    vocabulary = json.loads((demo_model / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    return {word: number for word, number in vocabulary.items() if word.isalpha()}


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({"generation_config": {"eos_token_id": [7, 9]}, "config": {"eos_token_id": 8}}, (7, 9)),
        ({"config": {"eos_token_id": 8}}, (8,)),
        ({"config": {"eos_token_id": 8}, "tokenizer_config": {"eos_token": END}}, (8, 0)),
        ({"config": {"eos_token_id": 0}, "tokenizer_config": {"eos_token": END}}, (0,)),
        ({"config": {}, "tokenizer_config": {}, "special_tokens_map": {"eos_token": END}}, (0,)),
        ({"config": {}, "tokenizer_config": {"eos_token": "<|none|>"}}, ()),
        ({"config": {}, "tokenizer_config": {"eos_token": "x", "added_tokens_decoder": {"5": {"content": "x"}}}}, (5,)),
        ({"config": {}}, ()),
    ],
)
def test_an_answer_ends_at_what_any_file_names(tmp_path: Path, demo_model: Path, files: Any, found: Any) -> None:
    assert end_tokens(write(tmp_path / "model", demo_model, **files)) == found


def test_a_word_of_the_model_may_be_the_end(tmp_path: Path, demo_model: Path) -> None:
    word, number = next(iter(ids(demo_model).items()))
    folder = write(tmp_path / "model", demo_model, tokenizer_config={"eos_token": word})
    assert end_tokens(folder) == (number,)
    assert end_tokens(folder, {word: 77}.get) == (77,), "a gateway asks the tokenizer that it has"


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"added_tokens": 3, "model": {}}', '{"added_tokens": [{}]}', "[" * 9999]
)
def test_a_malformed_tokenizer_is_named(tmp_path: Path, demo_model: Path, text: str) -> None:
    folder = write(tmp_path / "model", demo_model, tokenizer_config={"eos_token": "x"})
    (folder / "tokenizer.json").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=r"tokenizer\.json: "):
        end_tokens(folder)
