"""LoRA adapters as PEFT saves them, made here, and models with one merged into their weights."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from tandem.engine.lora import checkpoint_shapes
from tandem.engine.models import read_model_config

ATTENTION = ("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj")


def make_adapter(
    folder: Path,
    model: Path,
    *,
    rank: int = 4,
    seed: int = 0,
    targets: Sequence[str] | None = None,
    size: float = 0.3,
    **said: Any,
) -> Path:
    """`said` goes into adapter_config.json; without `targets` all that can be adapted is."""
    config, generator = read_model_config(model), torch.Generator().manual_seed(seed)
    targets = targets or tuple(checkpoint_shapes(config))
    tensors = {}
    for layer in range(config.num_layers):
        for name in targets:
            outputs, inputs = checkpoint_shapes(config)[name]
            block = "self_attn" if name in ATTENTION else "mlp"
            module = f"base_model.model.model.layers.{layer}.{block}.{name}"
            tensors[f"{module}.lora_A.weight"] = torch.randn(rank, inputs, generator=generator) * size
            tensors[f"{module}.lora_B.weight"] = torch.randn(outputs, rank, generator=generator) * size
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    written = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(targets), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(written | said), encoding="utf-8")
    return folder


def merged(model: PreTrainedModel, adapter: Path) -> PreTrainedModel:
    """The model with W + alpha / r * B A, as PEFT's merge_and_unload makes it."""
    said = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))
    tensors, made = load_file(adapter / "adapter_model.safetensors"), copy.deepcopy(model)
    for name, a in tensors.items():
        if name.endswith("lora_A.weight"):
            module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            b, rank = tensors[name.replace("lora_A", "lora_B")], len(a)
            scale = said["lora_alpha"] / (rank**0.5 if said.get("use_rslora") else rank)
            with torch.no_grad():
                made.get_submodule(module).weight += scale * b @ a
    return made
