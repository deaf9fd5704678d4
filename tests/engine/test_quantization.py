"""Quantized weights: near what they were, near in what the model says, and never mixed up with the plain ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.quality import DEMO, agreement, held_out, load, logits_of, perplexity
from tandem.engine.quantization.quantization import quantize
from tests.engine.tiny import Families, generate, greedy, make_engine, prompt_of


@pytest.mark.long
def test_quality_has_bounds() -> None:
    """Perplexity on held-out text: +1 % with int8, weights or KV, +5 % with int4."""
    sequences, plain = held_out(DEMO, 3), load(DEMO, "none")
    base = perplexity(plain, sequences)
    assert 0 < abs(perplexity(plain, sequences, torch.int8) / base - 1) < 0.01
    assert agreement(plain, plain, sequences, torch.int8) > 0.95
    for method, most, same in (("int8", 0.01, 0.95), ("int4", 0.05, 0.80)):
        model = load(DEMO, method)
        assert abs(perplexity(model, sequences) / base - 1) < most
        assert agreement(model, plain, sequences) > same


@pytest.mark.parametrize(("method", "most"), [("int8", 0.01), ("int4", 0.1)])
def test_numbers_hardly_move(method: str, most: float) -> None:
    weight = torch.randn(96, 192, generator=torch.Generator().manual_seed(2))
    weight[5], weight[6] = 0.0, 3.0
    found = quantize(weight, method)
    assert (found.bits, found.shape) == (8 if method == "int8" else 4, weight.shape)
    moved = (found.dense(torch.float32) - weight).norm() / weight.norm()
    assert moved < most
    assert torch.equal(found.dense(torch.float32)[5], weight[5])
    assert torch.equal(found.rows(torch.tensor([7, 3]), torch.float32), found.dense(torch.float32)[[7, 3]])


@pytest.mark.parametrize("family_name", ["llama3", "llama-biased"])
def test_an_engine_says_what_the_quantized_model_says(family_name: str, family: Families) -> None:
    """Tied and untied heads; the layout's revision keeps such KV apart from the plain model's."""
    path = family(family_name)[1]
    engines = {method: make_engine(path, quantization=method) for method in ("none", "int8", "int4")}
    assert len({engine.layout.hash for engine in engines.values()}) == 3
    prompt = prompt_of(20)
    for method in ("int8", "int4"):
        model, ids = load(path, method), list(prompt)
        for _ in range(6):
            ids.append(int(logits_of(model, ids)[-1].argmax()))
        assert generate(engines[method], prompt, greedy(6)) == ids[len(prompt) :]


def test_unknown_methods_are_refused_by_name(llama: Path) -> None:
    with pytest.raises(ValueError, match="quantization: 'int3' is not one of none, int8, int4, fp8"):
        make_engine(llama, quantization="int3")
