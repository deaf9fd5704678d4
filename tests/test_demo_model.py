"""The demo models: what they are, that the engine agrees with transformers on them, and that they write Python."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from tandem.engine import Engine, EngineConfig, Request, SamplingParams
from tests.marks import long_but

DEMO = Path(__file__).parents[1] / "models" / "demo"
PROMPTS = ["def ", "import ", "class Stack:\n    def push(self, item):\n", "for i in range(10):\n"]


def greedy(engine: Engine, token_ids: list[int], max_tokens: int, penalty: float = 1.0) -> list[int]:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0, repetition_penalty=penalty)
    engine.add(Request("demo", token_ids, sampling))
    tokens: list[int] = []
    while engine.has_work():
        tokens += [token.token_id for output in engine.step() for token in output.tokens]
    return tokens


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(DEMO / "target" / "tokenizer.json"))


@pytest.fixture(scope="module", params=["target", "draft"])
def folder(request: pytest.FixtureRequest) -> Path:
    return DEMO / str(request.param)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    return Engine(EngineConfig(model_path=folder, model_name="demo", dtype="float32", num_blocks=64, num_threads=1))


@pytest.mark.parametrize("prompt", long_but(PROMPTS[:1], PROMPTS))
def test_greedy_tokens_equal_transformers(engine: Engine, folder: Path, tokenizer: Tokenizer, prompt: str) -> None:
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    token_ids = tokenizer.encode(prompt).ids
    with torch.no_grad():
        ids = torch.tensor([token_ids])
        generated = theirs.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=48,
            do_sample=False,
            eos_token_id=None,
            repetition_penalty=1.0,
        )
    assert greedy(engine, token_ids, 48) == generated[0, len(token_ids) :].tolist()


def test_one_tokenizer_and_it_is_transformers_too(tokenizer: Tokenizer) -> None:
    text = 'def naïve(x):\n    """Grüße, 世界 🎉."""\n    return x or 42\n'
    assert (DEMO / "draft" / "tokenizer.json").read_text(encoding="utf-8") == (
        DEMO / "target" / "tokenizer.json"
    ).read_text(encoding="utf-8")
    ids = tokenizer.encode(text).ids
    assert AutoTokenizer.from_pretrained(DEMO / "target")(text)["input_ids"] == ids
    assert tokenizer.decode(ids) == text


def test_both_are_small() -> None:
    assert sum(f.stat().st_size for f in DEMO.rglob("*") if f.is_file()) < 30e6


@pytest.mark.parametrize("prompt", ["def ", "import "])
def test_the_target_writes_python_and_does_not_loop_at_once(tokenizer: Tokenizer, prompt: str) -> None:
    """Greedy, with the repetition penalty of its generation config, as every client gets it who sets none."""
    penalty = json.loads((DEMO / "target" / "generation_config.json").read_text(encoding="utf-8"))["repetition_penalty"]
    config = EngineConfig(model_path=DEMO / "target", model_name="demo", num_blocks=64, num_threads=1)
    text = prompt + tokenizer.decode(greedy(Engine(config), tokenizer.encode(prompt).ids, 40, penalty))
    lines = [line for line in text.splitlines() if line.strip()]
    assert len(lines) >= 2, text
    assert len(set(lines[:3])) == len(lines[:3]), text
    assert max(lines.count(line) for line in lines) < 3, text
    ast.parse(lines[0] + ("\n    pass" if lines[0].endswith(":") else ""))
