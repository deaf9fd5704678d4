"""A Hugging Face `config.json`, read into the few facts the decoder needs; what it cannot serve is refused by name.

config.json ── family (model_type) ──> which biases and norms exist
            ── rope_parameters | rope_theta + rope_scaling ──> Rope
            ── generation_config.json ──> end-of-text ids
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary frequencies: `kind` default, linear (all slowed by `factor`) or llama3 (the slow ones slowed)."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A Llama-like decoder. `max_model_len` counts prompt and answer; `dtype` is what the weights were saved in."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: Rope
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tie_word_embeddings: bool
    max_model_len: int
    eos_token_ids: frozenset[int]
    dtype: str

    @property
    def multiplications(self) -> int:
        """Of one token with all layers' weights; attention, embedding and head are left out."""
        attention = 2 * self.hidden_size * self.head_dim * (self.num_heads + self.num_kv_heads)
        return self.num_layers * (attention + 3 * self.hidden_size * self.intermediate_size)


def read_model_config(path: Path, max_model_len: int | None = None) -> ModelConfig:
    """Read the model folder at `path`; `max_model_len` shortens the context. ValueError names what is unsupported."""
    config_path = path / "config.json"
    if not config_path.is_file():
        raise ValueError(f"model_path: {config_path} does not exist")
    raw = json.loads(config_path.read_text())
    try:
        return _model_config(raw, _eos_token_ids(path, raw), max_model_len)
    except KeyError as error:
        raise ValueError(f"{config_path}: {error.args[0]} is missing") from None


def _model_config(raw: Json, eos_token_ids: frozenset[int], max_model_len: int | None) -> ModelConfig:
    family = raw["model_type"]
    heads = raw["num_attention_heads"]
    rope = _rope(raw)
    length = _max_model_len(raw, rope, max_model_len)
    _refuse_unsupported(raw, family, length)
    attention_bias = family in ("llama", "qwen3") and bool(raw.get("attention_bias"))
    return ModelConfig(
        model_type=family,
        vocab_size=raw["vocab_size"],
        hidden_size=raw["hidden_size"],
        intermediate_size=raw["intermediate_size"],
        num_layers=raw["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=raw.get("num_key_value_heads") or heads,
        head_dim=raw.get("head_dim") or (128 if family == "qwen3" else raw["hidden_size"] // heads),
        rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
        rope=rope,
        qkv_bias=attention_bias or family == "qwen2",
        o_bias=attention_bias,
        mlp_bias=family == "llama" and bool(raw.get("mlp_bias")),
        qk_norm=family == "qwen3",
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        max_model_len=length,
        eos_token_ids=eos_token_ids,
        dtype=raw.get("dtype") or raw.get("torch_dtype") or "float32",
    )


def _rope(raw: Json) -> Rope:
    """transformers 5 writes `rope_parameters`; before it there were `rope_theta` and `rope_scaling`."""
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in ("default", "linear", "llama3"):
        raise ValueError(f"rope_type: {kind!r} is not one of default, linear, llama3")
    theta = float(rope.get("rope_theta") or raw.get("rope_theta") or 10000.0)
    if kind == "default":
        return Rope(theta)
    if kind == "linear":
        return Rope(theta, kind, float(rope["factor"]))
    low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    return Rope(theta, kind, float(rope["factor"]), low, high, int(rope["original_max_position_embeddings"]))


def _max_model_len(raw: Json, rope: Rope, wanted: int | None) -> int:
    longest = raw["max_position_embeddings"]
    if rope.kind == "linear":  # max_position_embeddings counts unstretched positions
        longest = int(longest * rope.factor)
    if wanted is not None and wanted > longest:
        raise ValueError(f"max_model_len: {wanted} is more than the model's {longest}")
    return int(wanted or longest)


def _refuse_unsupported(raw: Json, family: str, max_model_len: int) -> None:
    if family not in ("llama", "mistral", "qwen2", "qwen3"):
        raise ValueError(f"model_type: {family!r} is not one of llama, mistral, qwen2, qwen3")
    for field, served in (("hidden_act", "silu"), ("quantization_config", None), ("partial_rotary_factor", 1.0)):
        if raw.get(field, served) not in (served, None):
            raise ValueError(f"{field}: {raw[field]!r} is not supported")
    window = _sliding_window(raw, family)
    if window is not None and window < max_model_len:
        raise ValueError(f"sliding_window: {window} is less than max_model_len {max_model_len}; set a smaller one")


def _sliding_window(raw: Json, family: str) -> int | None:
    if family == "mistral":
        window: int | None = raw.get("sliding_window", 4096)  # what the family means by leaving it out
        return window
    return raw.get("sliding_window") if family.startswith("qwen") and raw.get("use_sliding_window") else None


def _eos_token_ids(path: Path, raw: Json) -> frozenset[int]:
    generation = path / "generation_config.json"
    eos = json.loads(generation.read_text()).get("eos_token_id") if generation.is_file() else None
    eos = raw.get("eos_token_id") if eos is None else eos
    return frozenset(eos) if isinstance(eos, list) else frozenset(() if eos is None else (eos,))
