"""Heads as they are published, with random weights, for a model made by transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

KINDS = ("medusa", "medusa-vllm", "eagle", "eagle3")
TAPPED = [0, 1, 2]


def make_heads(kind: str, folder: Path, model: PreTrainedModel, seed: int = 5) -> dict[str, Tensor]:
    """Puts heads of `kind` into `folder`; returns their tensors. EAGLE-3's know every other token."""
    chance = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=chance) * 0.3 + (1.0 if len(shape) == 1 else 0.0)

    if kind.startswith("medusa"):
        return _medusa(kind, folder, model, random)
    return _eagle(kind == "eagle3", folder, model, random)


def _medusa(kind: str, folder: Path, model: PreTrainedModel, random: Callable[..., Tensor]) -> dict[str, Tensor]:
    hidden, vocab, tensors = model.config.hidden_size, model.config.vocab_size, {}
    for head in range(3):
        old, new = f"{head}.0.linear", f"medusa_heads.blocks.{head}.layers.0"
        name = old if kind == "medusa" else new
        tensors[f"{name}.weight"], tensors[f"{name}.bias"] = random(hidden, hidden), random(hidden)
        last = f"{head}.1.weight" if kind == "medusa" else f"medusa_heads.lm_heads.{head}.weight"
        tensors[last] = random(vocab, hidden)
    _save(tensors, folder / ("medusa_lm_head.pt" if kind == "medusa" else "model.safetensors"), {}, model)
    return tensors


def _eagle(three: bool, folder: Path, model: PreTrainedModel, random: Callable[..., Tensor]) -> dict[str, Tensor]:
    config = model.config
    hidden, vocab, inner = config.hidden_size, config.vocab_size, config.intermediate_size
    dim = getattr(config, "head_dim", None) or hidden // config.num_attention_heads
    heads, kv_heads = config.num_attention_heads * dim, config.num_key_value_heads * dim
    layer, inputs = ("midlayer", 2 * hidden) if three else ("layers.0", hidden)
    tensors = {
        "fc.weight": random(hidden, 3 * hidden if three else 2 * hidden),
        f"{layer}.self_attn.q_proj.weight": random(heads, inputs),
        f"{layer}.self_attn.k_proj.weight": random(kv_heads, inputs),
        f"{layer}.self_attn.v_proj.weight": random(kv_heads, inputs),
        f"{layer}.self_attn.o_proj.weight": random(hidden, heads),
        f"{layer}.mlp.gate_proj.weight": random(inner, hidden),
        f"{layer}.mlp.up_proj.weight": random(inner, hidden),
        f"{layer}.mlp.down_proj.weight": random(hidden, inner),
        f"{layer}.post_attention_layernorm.weight": random(hidden),
    }
    if not three:
        tensors["fc.bias"] = random(hidden)
        tensors["embed_tokens.weight"] = model.get_input_embeddings().weight.detach().float().clone()
        _save(tensors, folder / "pytorch_model.bin", {}, model)
        return tensors
    known = vocab // 2
    tensors |= {
        "midlayer.input_layernorm.weight": random(hidden), "midlayer.hidden_norm.weight": random(hidden),
        "norm.weight": random(hidden), "lm_head.weight": random(known, hidden), "d2t": torch.arange(known),
        "t2d": torch.arange(vocab) % 2 == 0,
    }  # fmt: skip
    said = {"draft_vocab_size": known, "eagle_aux_hidden_state_layer_ids": TAPPED}
    _save(tensors, folder / "model.safetensors", said, model)
    return tensors


def _save(tensors: dict[str, Tensor], file: Path, said: dict[str, object], model: PreTrainedModel) -> None:
    if file.suffix == ".safetensors":
        save_file(tensors, file)
    else:
        torch.save(tensors, file)
    config = model.config.to_dict() | {"num_hidden_layers": 1, "dtype": "float32"} | said
    (file.parent / "config.json").write_text(json.dumps(config, default=str), encoding="utf-8")
