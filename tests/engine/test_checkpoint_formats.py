"""Quantized checkpoints as they are on the hub: their engine says what one of the same numbers, opened, says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem.engine.models import Decoder, read_model_config
from tandem.engine.quantization.checkpoint_formats import checkpoint_format
from tandem.engine.quantization.quantization import QuantizedWeight
from tandem.engine.weights.loader import load_weights
from tests.engine import quantized_folders as made
from tests.engine.tiny import Families, generate, greedy, make_engine, prompt_of


def compressed(form: str, bits: int, group: int | None, symmetric: bool) -> dict[str, Any]:
    strategy = {"strategy": "group", "group_size": group} if group else {"strategy": "channel", "group_size": None}
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, **strategy}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups, "ignore": ["lm_head"]}


def gptq(bits: int, group: int, **said: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": False, "sym": False, **said}


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm", "zero_point": True}
BNB = {"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False}
CASES: dict[str, tuple[made.Pack, dict[str, Any], int, int | None, bool]] = {
    "gptq 4": (made.gptq(True), gptq(4, 16), 4, 16, False),
    "gptq 8": (made.gptq(True), gptq(8, -1), 8, None, False),
    "gptq v2": (made.gptq(False), gptq(4, 8, checkpoint_format="gptq_v2"), 4, 8, False),
    "awq": (made.awq, AWQ, 4, 16, False),
    "packed 4": (made.pack_quantized, compressed("pack-quantized", 4, 16, False), 4, 16, False),
    "packed 8": (made.pack_quantized, compressed("pack-quantized", 8, None, False), 8, None, False),
    "int 8": (made.int_quantized, compressed("int-quantized", 8, None, True), 8, None, True),
    "bitsandbytes": (made.bitsandbytes, BNB, 8, None, True),
    "gptq desc_act": (made.gptq(True), gptq(4, 16, desc_act=True), 4, 16, False),
    "packed actorder": (made.pack_quantized, compressed("pack-quantized", 8, 8, False), 8, 8, False),
}
OTHER_ORDER = ("gptq desc_act", "packed actorder")


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_an_engine_says_what_the_opened_checkpoint_says(name: str, family: Families, tmp_path: Path) -> None:
    pack, config, bits, group, symmetric = CASES[name]
    source = family("llama-biased" if name == "gptq 4" else "qwen3")[1]
    quantized, opened = made.make_checkpoint(
        source, tmp_path, pack, config, bits=bits, group=group, symmetric=symmetric, ordered=name not in OTHER_ORDER
    )
    model, plain = (Decoder(read_model_config(path), torch.float32) for path in (quantized, opened))
    load_weights(model, quantized)
    load_weights(plain, opened)
    for (linear, _, _), (other, _, _) in zip(model.fused(), plain.fused(), strict=True):
        assert isinstance(linear.weight, QuantizedWeight)
        assert isinstance(other.weight, torch.Tensor)
        assert linear.weight.bits == bits
        assert (linear.weight.order is None) == (name not in OTHER_ORDER)
        torch.testing.assert_close(linear.weight.dense(torch.float32), other.weight, rtol=1e-5, atol=1e-6)
    prompt = prompt_of(20)
    assert generate(make_engine(quantized), prompt, greedy(8)) == generate(make_engine(opened), prompt, greedy(8))


def test_a_layer_left_plain_opens_those_fused_with_it(family: Families, tmp_path: Path) -> None:
    pack, config, bits, group, symmetric = CASES["awq"]
    quantized, opened = made.make_checkpoint(
        family("qwen3")[1], tmp_path, pack, config, bits=bits, group=group, symmetric=symmetric
    )
    tensors, plain = load_file(quantized / "model.safetensors"), load_file(opened / "model.safetensors")
    name = "model.layers.1.self_attn.k_proj"
    for end in ("qweight", "qzeros", "scales"):
        del tensors[f"{name}.{end}"]
    tensors[f"{name}.weight"] = plain[f"{name}.weight"]
    save_file(tensors, quantized / "model.safetensors")
    prompt = prompt_of(20)
    assert generate(make_engine(quantized), prompt, greedy(8)) == generate(make_engine(opened), prompt, greedy(8))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "exl2"}, "'exl2'"),
        ({}, "quant_method"),
        (gptq(3, 16), "gptq.bits: .*got '3'"),
        (AWQ | {"version": "gemv"}, "awq.version: .*got 'gemv'"),
        (BNB | {"load_in_8bit": False}, "bitsandbytes.load_in_8bit"),
        (compressed("marlin-24", 8, None, True), "format: .*got 'marlin-24'"),
        (compressed("int-quantized", 4, 16, True), "in 8 bits and symmetric only"),
    ],
)
def test_other_formats_are_refused_by_name(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"quantization_config.*{message}"):
        checkpoint_format(config)


def test_what_is_wrong_in_a_checkpoint_is_named(family: Families, tmp_path: Path) -> None:
    pack, config, bits, group, symmetric = CASES["gptq 4"]
    folder, _ = made.make_checkpoint(
        family("qwen3")[1], tmp_path, pack, config, bits=bits, group=group, symmetric=symmetric
    )
    with pytest.raises(ValueError, match="quantization: int8, but the checkpoint is quantized already"):
        make_engine(folder, quantization="int8")
    whole = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.down_proj"
    for spoiled, message in (
        (
            {f"{name}.g_idx": whole[f"{name}.g_idx"].clamp(min=1)},
            f"{name}: g_idx: its groups are not of 16 inputs each",
        ),
        ({f"{name}.qzeros": whole[f"{name}.qzeros"][:, 1:].contiguous()}, f"{name}.qzeros has shape"),
        ({f"{name}.bias": torch.ones(32)}, f"tensor {name}.bias: the model has no bias there"),
        ({f"{name}.more": torch.ones(1)}, f"1 extra tensors: {name}.more"),
    ):
        save_file(whole | spoiled, folder / "model.safetensors")
        with pytest.raises(ValueError, match=message):
            make_engine(folder)
    said = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(said | {"quantization_config": gptq(4, 24)}), encoding="utf-8")
    with pytest.raises(ValueError, match="group_size: 24 does not divide 32 inputs"):
        make_engine(folder)
