from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.models import LARGE, SMALL, made
from tests.benchmarks.conftest import TINY


@pytest.mark.long
def test_a_made_model_is_one_that_transformers_loads(tiny_model: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype="auto")
    assert model.dtype == torch.bfloat16
    assert model.config.tie_word_embeddings
    assert sum(p.numel() for p in model.parameters() if p.dim() == 2) == TINY.parameters
    assert model(torch.tensor([[300, 301]])).logits.shape == (1, 2, TINY.vocab)


def test_its_tokenizer_gives_text_back_and_fills_the_vocabulary(tiny_model: Path) -> None:
    tokenizer = Tokenizer.from_file(str(tiny_model / "tokenizer.json"))
    text = "def naïve(x):\n    return x  # 日本"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.get_vocab_size() == TINY.vocab
    assert AutoTokenizer.from_pretrained(tiny_model).eos_token_id == 0


@pytest.mark.long
def test_the_same_shape_gives_the_same_weights(tiny_model: Path, tmp_path: Path) -> None:
    again = made(TINY, tmp_path / "again")
    assert (again / "model.safetensors").read_bytes() == (tiny_model / "model.safetensors").read_bytes()


def test_the_shapes_have_the_sizes_they_are_named_by() -> None:
    assert round(LARGE.parameters / 1e6) == 386
    assert round(SMALL.parameters / 1e6, 1) == 14.7
