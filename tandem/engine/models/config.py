"""A Hugging Face `config.json`, read into the few facts the decoder needs; what it cannot serve is refused by name.

config.json ── family (model_type) ──> which biases and norms exist
            ── rope_parameters | rope_theta + rope_scaling ──> Rope
            ── generation_config.json ──> end-of-text ids
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from tandem.checkpoints import FAMILIES, ModelFile, end_tokens, read_file
from tandem.engine.quantization import CheckpointFormat, checkpoint_format

# Far beyond any model there is: what is larger would fill the machine before it is found to be wrong.
Size = Annotated[int, Field(ge=1, le=2**22)]
Count = Annotated[int, Field(ge=1, le=2**12)]
Positive = Annotated[float, Field(gt=0, le=1e12)]


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
    quantized: CheckpointFormat | None = None  # how the checkpoint holds its linear layers

    @property
    def multiplications(self) -> int:
        """Multiplications of one token with all layers' weights; attention, embedding and head are left out."""
        attention = 2 * self.hidden_size * self.head_dim * (self.num_heads + self.num_kv_heads)
        return self.num_layers * (attention + 3 * self.hidden_size * self.intermediate_size)


class RopeFile(ModelFile):
    """`rope_parameters` of transformers 5; before it there were `rope_theta` and `rope_scaling`."""

    rope_type: str | None = None
    type: str | None = None
    rope_theta: Positive | None = None
    factor: Positive | None = None
    low_freq_factor: Positive | None = None
    high_freq_factor: Positive | None = None
    original_max_position_embeddings: Size | None = None


class ConfigFile(ModelFile):
    """The fields of config.json that are used."""

    model_type: str
    vocab_size: Size
    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: Count
    num_attention_heads: Count
    num_key_value_heads: Count | None = None
    head_dim: Count | None = None
    rms_norm_eps: Positive = 1e-6
    max_position_embeddings: Annotated[int, Field(ge=1, lt=2**31)]
    rope_parameters: RopeFile | None = None
    rope_scaling: RopeFile | None = None
    rope_theta: Positive | None = None
    attention_bias: bool | None = None
    mlp_bias: bool | None = None
    tie_word_embeddings: bool | None = None
    dtype: str | None = None
    torch_dtype: str | None = None
    hidden_act: Any = "silu"
    quantization_config: Any = None
    partial_rotary_factor: float | None = 1.0
    sliding_window: Size | None = None
    use_sliding_window: bool | None = None


def read_model_config(path: Path, max_model_len: int | None = None) -> ModelConfig:
    """Read the model folder at `path`; `max_model_len` shortens the context. ValueError names what is unsupported."""
    file = path / "config.json"
    if not file.is_file():
        raise ValueError(f"model_path: {file} does not exist")
    raw = read_file(ConfigFile, file)
    try:
        return _model_config(raw, frozenset(end_tokens(path)), max_model_len)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None


def _model_config(raw: ConfigFile, eos_token_ids: frozenset[int], max_model_len: int | None) -> ModelConfig:
    family, heads = raw.model_type, raw.num_attention_heads
    rope = _rope(raw)
    length = _max_model_len(raw, rope, max_model_len)
    _refuse_unsupported(raw, length)
    attention_bias = family in ("llama", "qwen3") and bool(raw.attention_bias)
    return ModelConfig(
        model_type=family,
        vocab_size=raw.vocab_size,
        hidden_size=raw.hidden_size,
        intermediate_size=raw.intermediate_size,
        num_layers=raw.num_hidden_layers,
        num_heads=heads,
        num_kv_heads=_kv_heads(raw),
        head_dim=_head_dim(raw),
        rms_norm_eps=raw.rms_norm_eps,
        rope=rope,
        qkv_bias=attention_bias or family == "qwen2",
        o_bias=attention_bias,
        mlp_bias=family == "llama" and bool(raw.mlp_bias),
        qk_norm=family == "qwen3",
        tie_word_embeddings=bool(raw.tie_word_embeddings),
        max_model_len=length,
        eos_token_ids=eos_token_ids,
        dtype=raw.dtype or raw.torch_dtype or "float32",
        quantized=checkpoint_format(raw.quantization_config) if raw.quantization_config else None,
    )


def _kv_heads(raw: ConfigFile) -> int:
    heads, kv_heads = raw.num_attention_heads, raw.num_key_value_heads or raw.num_attention_heads
    if heads % kv_heads:
        raise ValueError(f"num_key_value_heads: {kv_heads} do not divide {heads} attention heads")
    return kv_heads


def _head_dim(raw: ConfigFile) -> int:
    head_dim = raw.head_dim or (128 if raw.model_type == "qwen3" else raw.hidden_size // raw.num_attention_heads)
    if head_dim < 2 or head_dim % 2:
        raise ValueError(f"head_dim: {head_dim} is not an even number of channels")
    return head_dim


def _rope(raw: ConfigFile) -> Rope:
    rope = raw.rope_parameters or raw.rope_scaling or RopeFile()
    kind = rope.rope_type or rope.type or "default"
    if kind not in ("default", "linear", "llama3"):
        raise ValueError(f"rope_type: {kind!r} is not one of default, linear, llama3")
    theta = rope.rope_theta or raw.rope_theta or 10000.0
    if kind == "default":
        return Rope(theta)
    factor = _needed(rope, "factor")
    if kind == "linear":
        return Rope(theta, kind, factor)
    low, high = _needed(rope, "low_freq_factor"), _needed(rope, "high_freq_factor")
    if low == high:
        raise ValueError(f"high_freq_factor: must not be low_freq_factor, {low}")
    return Rope(theta, kind, factor, low, high, int(_needed(rope, "original_max_position_embeddings")))


def _needed(rope: RopeFile, name: str) -> float:
    value: float | None = getattr(rope, name)
    if value is None:
        raise ValueError(f"{name} is missing")
    return float(value)


def _max_model_len(raw: ConfigFile, rope: Rope, wanted: int | None) -> int:
    longest = raw.max_position_embeddings
    if rope.kind == "linear":  # max_position_embeddings counts unstretched positions
        longest = int(longest * rope.factor)
    if wanted is not None and wanted > longest:
        raise ValueError(f"max_model_len: {wanted} is more than the model's {longest}")
    return wanted or longest


def _refuse_unsupported(raw: ConfigFile, max_model_len: int) -> None:
    if raw.model_type not in FAMILIES:
        raise ValueError(f"model_type: {raw.model_type!r} is not one of {', '.join(FAMILIES)}")
    for field, served in (("hidden_act", "silu"), ("partial_rotary_factor", 1.0)):
        value = getattr(raw, field)
        if value not in (served, None):
            raise ValueError(f"{field}: {value!r} is not supported")
    window = _sliding_window(raw)
    if window is not None and window < max_model_len:
        raise ValueError(f"sliding_window: {window} is less than max_model_len {max_model_len}; set a smaller one")


def _sliding_window(raw: ConfigFile) -> int | None:
    if raw.model_type == "mistral":
        said = "sliding_window" in raw.model_fields_set
        return raw.sliding_window if said else 4096  # what the family means by leaving it out
    return raw.sliding_window if raw.model_type.startswith("qwen") and raw.use_sliding_window else None
