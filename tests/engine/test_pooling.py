"""Embeddings are sentence-transformers' arithmetic: transformers' hidden states, pooled, cut and normalized."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from transformers import PreTrainedModel

from tandem.checkpoints import PoolingRule, read_pooling
from tandem.engine import Engine, Request
from tests.engine.tiny import Families, assert_idle, generate, greedy, make_engine, prompt_of, run

LENGTHS = (1, 4, 17, 38, 50)  # around blocks of 4 and chunks of 10
MODES = {"last": "lasttoken", "mean": "mean_tokens", "cls": "cls_token"}


def written(folder: Path, kind: str, normalizes: bool) -> None:
    """As sentence-transformers saves a model."""
    types = ["Transformer", "Pooling"] + ["Normalize"] * normalizes
    modules = [
        {"idx": i, "name": str(i), "path": f"{i}_{name}" if i else "", "type": f"sentence_transformers.models.{name}"}
        for i, name in enumerate(types)
    ]
    (folder / "modules.json").write_text(json.dumps(modules), encoding="utf-8")
    (folder / "1_Pooling").mkdir(exist_ok=True)
    said = {f"pooling_mode_{mode}": mode == MODES[kind] for mode in (*MODES.values(), "max_tokens")}
    (folder / "1_Pooling" / "config.json").write_text(
        json.dumps({"word_embedding_dimension": 32, **said}), encoding="utf-8"
    )


def expected(model: PreTrainedModel, prompt: list[int], kind: str, normalizes: bool, dimensions: int) -> torch.Tensor:
    with torch.inference_mode():
        states = model.base_model(torch.tensor([prompt])).last_hidden_state[0].float()
    vector = {"last": states[-1], "cls": states[0], "mean": states.mean(0)}[kind][: dimensions or None]
    return F.normalize(vector, dim=0) if normalizes else vector


def embed(engine: Engine, dimensions: int = 0) -> dict[int, list[float]]:
    for length in LENGTHS:
        request = Request(str(length), prompt_of(length, length), greedy(1), dimensions=dimensions)
        engine.add(request, prefill_only=True)
    outputs = run(engine)
    assert_idle(engine)
    return {length: outputs[str(length)][-1].embedding for length in LENGTHS}


@pytest.mark.long
@pytest.mark.parametrize("name", ["llama3", "qwen3", "gemma3", "granite"])
@pytest.mark.parametrize("kind", MODES)
def test_vectors_equal_transformers(name: str, kind: str, family: Families, tmp_path: Path) -> None:
    """In chunks beside each other, and again with what is cached."""
    model, path = family(name)
    folder = Path(shutil.copytree(path, tmp_path / "model"))
    for normalizes in (False, True):
        written(folder, kind, normalizes)
        engine = make_engine(folder, max_num_batched_tokens=10)
        for dimensions in (0, 8, 0):
            for length, vector in embed(engine, dimensions).items():
                wanted = expected(model, prompt_of(length, length), kind, normalizes, dimensions)
                torch.testing.assert_close(torch.tensor(vector), wanted, atol=1e-5, rtol=1e-4)


def test_answers_beside_them_are_as_they_were(family: Families, tmp_path: Path) -> None:
    path = family("llama3")[1]
    alone = generate(make_engine(path), prompt_of(20, 1), greedy(12, ignore_eos=True))
    engine = make_engine(path, max_num_batched_tokens=10)
    engine.add(Request("answer", prompt_of(20, 1), greedy(12, ignore_eos=True)))
    engine.add(Request("vector", prompt_of(50, 50), greedy(1), dimensions=0), prefill_only=True)
    outputs = run(engine)
    assert [token.token_id for output in outputs["answer"] for token in output.tokens] == alone
    assert len(outputs["vector"][-1].embedding) == 32
    assert all(not output.embedding for output in outputs["answer"])


@pytest.mark.parametrize("dimensions", [-1, 33, 2**31])
def test_no_more_numbers_than_there_are(dimensions: int, family: Families) -> None:
    engine = make_engine(family("llama3")[1])
    with pytest.raises(ValueError, match="dimensions: must be between 1 and 32"):
        engine.add(Request("a", [1, 2], greedy(1), dimensions=dimensions), prefill_only=True)
    assert_idle(engine)


def test_a_folder_that_says_nothing_has_the_last_state(tmp_path: Path) -> None:
    assert read_pooling(tmp_path) == PoolingRule("last", normalizes=True)


@pytest.mark.parametrize(
    ("modules", "pooling"),
    [
        ("{", None),
        ("{}", None),
        ("[1]", None),
        ([{"type": "x.Transformer", "path": ""}], None),
        ([{"type": "x.Pooling", "path": "../secrets"}], None),
        ([{"type": "x.Pooling", "path": 7}], None),
        ([{"type": "x.Pooling", "path": "1_Pooling"}, {"type": "x.Dense", "path": "2_Dense"}], None),
        ([{"type": "x.Pooling", "path": "1_Pooling"}], {}),
        ([{"type": "x.Pooling", "path": "1_Pooling"}], {"pooling_mode_max_tokens": True}),
        (
            [{"type": "x.Pooling", "path": "1_Pooling"}],
            {"pooling_mode_max_tokens": True, "pooling_mode_cls_token": True},
        ),
        ([{"type": "x.Pooling", "path": "1_Pooling"}], {"pooling_mode": "max"}),
    ],
)
def test_what_is_not_known_is_named(tmp_path: Path, modules: Any, pooling: Any) -> None:
    (tmp_path / "modules.json").write_text(
        modules if isinstance(modules, str) else json.dumps(modules), encoding="utf-8"
    )
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(
        json.dumps(pooling if pooling is not None else {}), encoding="utf-8"
    )
    with pytest.raises(ValueError, match=r"modules\.json|config\.json"):
        read_pooling(tmp_path)


@pytest.mark.parametrize(("said", "kind"), [("mean", "mean"), ("cls", "cls"), ("lasttoken", "last")])
def test_the_mode_may_be_one_word(tmp_path: Path, said: str, kind: str) -> None:
    written(tmp_path, "last", normalizes=False)
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": said}), encoding="utf-8")
    assert read_pooling(tmp_path) == PoolingRule(kind, normalizes=False)
