"""FP8: checkpoints are read as their numbers are, and products in 8 bits are near those of plain weights.

torch multiplies 8-bit floats on CPUs, too, though slowly, so the same code runs here as on a GPU.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.quality import agreement, load
from tandem.engine.quantization.checkpoint_formats import checkpoint_format
from tandem.engine.quantization.fp8 import Fp8Weight, as_fp8, rounded
from tests.engine.quantized_folders import LINEAR
from tests.engine.tiny import Families, generate, greedy, make_engine, prompt_of

ACTIVATIONS = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}


def compressed(strategy: str, activations: dict[str, Any] | None = ACTIVATIONS, **weights: Any) -> dict[str, Any]:
    said = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, "dynamic": False, **weights}
    group = {"targets": ["Linear"], "weights": said, "input_activations": activations, "output_activations": None}
    return {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": group}}


BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [32, 20]}


def by_output(weight: Tensor) -> tuple[str, Tensor, Tensor]:
    return "weight_scale", (scale := weight.abs().amax(1, keepdim=True) / 448), scale


def by_tensor(weight: Tensor) -> tuple[str, Tensor, Tensor]:
    return "weight_scale", (weight.abs().max() / 448).view(1), weight.abs().max() / 448


def by_block(weight: Tensor) -> tuple[str, Tensor, Tensor]:
    """The last ones are smaller."""
    scales = torch.rand(-(-weight.shape[0] // 32), -(-weight.shape[1] // 20), generator=torch.Generator()) + 0.01
    each = scales.repeat_interleave(32, 0)[: weight.shape[0]].repeat_interleave(20, 1)[:, : weight.shape[1]]
    return "weight_scale_inv", scales, each


@pytest.mark.parametrize(
    ("config", "scaled"),
    [(compressed("channel"), by_output), (compressed("tensor", None), by_tensor), (BLOCKS, by_block)],
    ids=["channel", "tensor", "block"],
)
def test_an_engine_says_what_the_opened_checkpoint_says(
    config: dict[str, Any], scaled: Callable[[Tensor], tuple[str, Tensor, Tensor]], family: Families, tmp_path: Path
) -> None:
    source, held, opened = family("qwen3")[1], dict[str, Tensor](), dict[str, Tensor]()
    for name, tensor in load_file(source / "model.safetensors").items():
        layer, _, kind = name.rpartition(".")
        held[name] = opened[name] = tensor
        if kind == "weight" and layer.rpartition(".")[2] in LINEAR:
            end, scales, each = scaled(tensor)
            held[name] = (tensor / each).clamp(-448, 448).to(torch.float8_e4m3fn)
            held[f"{layer}.{end}"], opened[name] = scales, held[name].float() * each
    for path, tensors in ((tmp_path / "held", held), (tmp_path / "opened", opened)):
        shutil.copytree(source, path)
        save_file(tensors, path / "model.safetensors")
    said = json.loads((source / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "held" / "config.json").write_text(json.dumps(said | {"quantization_config": config}), encoding="utf-8")
    engines = [make_engine(tmp_path / name) for name in ("held", "opened")]
    assert len({tuple(generate(engine, prompt_of(20), greedy(12))) for engine in engines}) == 1


def test_products_are_near_and_parts_make_one_weight() -> None:
    chance = torch.Generator().manual_seed(1)
    weight, x = torch.randn(48, 64, generator=chance), torch.randn(5, 64, generator=chance)
    x[2], x[3] = 0.0, 1e4 * x[3]
    whole = rounded(weight)
    parts = as_fp8([rounded(weight[:16]), weight[16:]], torch.device("cpu"))
    assert isinstance(parts, Fp8Weight)
    assert torch.equal(parts.product(x), whole.product(x))
    assert whole.shape == (48, 64)
    assert ((whole.dense(torch.float32) - weight).abs() <= weight.abs() / 16 + whole.scales / 64).all()
    exact = x @ weight.T
    assert ((whole.product(x) - exact).norm(dim=1) <= 0.06 * exact.norm(dim=1)).all()


def test_a_model_in_fp8_says_nearly_what_it_said(family: Families) -> None:
    path = family("qwen3")[1]
    prompts = [prompt_of(40, seed) for seed in range(4)]
    assert agreement(load(path, "fp8"), load(path, "none"), prompts) > 0.6  # by chance 1 / 96


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (BLOCKS | {"activation_scheme": "static"}, "fp8.activation_scheme: .*got 'static'"),
        ({**BLOCKS, "weight_block_size": [0, 1]}, "weight_block_size"),
        (compressed("group", group_size=32), "format: 'float-quantized', float by group is not supported"),
        (compressed("channel", type="int"), "format: 'float-quantized', int by channel is not supported"),
        (compressed("channel", ACTIVATIONS | {"dynamic": False}), "input_activations.dynamic"),
        (compressed("channel", type="int") | {"format": "int-quantized"}, "input_activations: of integers"),
    ],
)
def test_other_kinds_are_refused_by_name(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"quantization_config.*{message}"):
        checkpoint_format(config)


def test_on_cpus_nothing_is_made_fp8(llama: Path) -> None:
    with pytest.raises(ValueError, match="quantization: fp8 is for GPUs; the device is cpu, which has int8"):
        make_engine(llama, quantization="fp8")
