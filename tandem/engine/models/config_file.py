"""The fields of a Hugging Face `config.json` that all families have; each family's own are in families/.

config.json ── model_type ──> its family's ConfigFile ── facts ──> ModelConfig
            ── rope_parameters | rope_theta + rope_scaling ──> Rope
            ── layer_types, sliding_window ──> windows
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field

from tandem.checkpoints import ModelFile
from tandem.engine.models.config import Rope

# A bound far beyond any real model: a wrong, larger size would fill the machine's memory before it is noticed.
Size = Annotated[int, Field(ge=1, le=2**22)]
Count = Annotated[int, Field(ge=1, le=2**12)]
Positive = Annotated[float, Field(gt=0, le=1e12)]
Factors = Annotated[list[Positive], Field(max_length=2**12)]

SLIDING, FULL = "sliding_attention", "full_attention"
KINDS = ("default", "linear", "llama3", "yarn", "longrope")


class RopeFile(ModelFile):
    """`rope_parameters` of transformers 5; older versions wrote `rope_theta` and `rope_scaling`."""

    rope_type: str | None = None
    type: str | None = None
    rope_theta: Positive | None = None
    partial_rotary_factor: Annotated[float, Field(gt=0, le=1)] | None = None
    factor: Positive | None = None
    low_freq_factor: Positive | None = None
    high_freq_factor: Positive | None = None
    original_max_position_embeddings: Size | None = None
    attention_factor: Positive | None = None
    beta_fast: Positive | None = None
    beta_slow: Positive | None = None
    mscale: Annotated[float, Field(ge=0, le=1e6)] | None = None
    mscale_all_dim: Annotated[float, Field(ge=0, le=1e6)] | None = None
    truncate: bool = True
    short_factor: Factors | None = None
    long_factor: Factors | None = None
    # Separate parameters of layers without and with a window, if they differ.
    full_attention: RopeFile | None = None
    sliding_attention: RopeFile | None = None

    def needed(self, name: str) -> Any:
        if (value := getattr(self, name)) is None:
            raise ValueError(f"{name} is missing")
        return value


class ConfigFile(ModelFile):
    """The fields that every family has. A family's subclass adds fields and overrides methods and constants."""

    default_theta: ClassVar[float] = 10000.0
    activations: ClassVar[Mapping[str, str]] = {"silu": ""}  # config.json's name to that of ModelConfig
    norm_names: ClassVar[tuple[str, str, str, str]] = ("input_layernorm", "", "post_attention_layernorm", "")
    turns_part: ClassVar[bool] = False  # partial_rotary_factor may be less than 1

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
    original_max_position_embeddings: Size | None = None
    rope_parameters: RopeFile | None = None
    rope_scaling: RopeFile | None = None
    rope_theta: Positive | None = None
    partial_rotary_factor: Annotated[float, Field(gt=0, le=1)] | None = None
    tie_word_embeddings: bool | None = None
    dtype: str | None = None
    torch_dtype: str | None = None
    hidden_act: Any = None
    hidden_activation: Any = None
    quantization_config: Any = None
    sliding_window: Annotated[int, Field(ge=0, le=2**31)] | None = None
    layer_types: Annotated[list[str], Field(max_length=2**12)] | None = None

    def facts(self) -> dict[str, Any]:
        """Returns the family's own fields of ModelConfig. Raises ValueError naming what is not served."""
        return {}

    def is_sliding(self, layer: int) -> bool:
        """True if the layer has a window; asked only if the config has no `layer_types`."""
        return False

    def ropes(self, length: int) -> tuple[Rope, Rope | None]:
        """Returns the Rope for contexts of `length`, and the Rope of layers with a window if they have their own."""
        return self.rope_of(self.rope_parameters or self.rope_scaling or RopeFile(), length), None

    @property
    def longest(self) -> int:
        """The number of tokens of the longest context."""
        rope = self.rope_parameters or self.rope_scaling
        # With linear scaling, max_position_embeddings counts positions before the stretching.
        is_stretched = rope is not None and (rope.rope_type or rope.type) == "linear"
        return int(self.max_position_embeddings * (rope.factor or 1)) if rope and is_stretched else (
            self.max_position_embeddings
        )  # fmt: skip

    def windows(self, length: int) -> tuple[int, ...]:
        """Returns how many tokens each layer sees in contexts of `length`, 0 for all; empty if no window is shorter."""
        window, sliding = self.sliding_window, self.sliding_layers
        if not window or window >= length or not sliding:
            return ()
        return tuple(window if layer in sliding else 0 for layer in range(self.num_hidden_layers))

    @property
    def sliding_layers(self) -> frozenset[int]:
        layers = range(self.num_hidden_layers)
        if self.layer_types is None:
            return frozenset(filter(self.is_sliding, layers))
        if len(self.layer_types) < len(layers):
            raise ValueError(f"layer_types: {len(self.layer_types)} of {len(layers)} layers")
        if other := sorted(set(self.layer_types) - {SLIDING, FULL}):
            raise ValueError(f"layer_types: {other[0]!r} is not supported")
        return frozenset(layer for layer in layers if self.layer_types[layer] == SLIDING)

    @property
    def kv_heads(self) -> int:
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads or self.num_attention_heads
        if heads % kv_heads:
            raise ValueError(f"num_key_value_heads: {kv_heads} do not divide {heads} attention heads")
        return kv_heads

    @property
    def head_size(self) -> int:
        head_dim = self.head_dim or self.hidden_size // self.num_attention_heads
        if head_dim < 2 or head_dim % 2:
            raise ValueError(f"head_dim: {head_dim} is not an even number of channels")
        return head_dim

    @property
    def rotary_dim(self) -> int:
        """The number of a head's numbers that are rotated."""
        rope = self.rope_parameters or self.rope_scaling
        part = (rope.partial_rotary_factor if rope else None) or self.partial_rotary_factor or 1.0
        if part != 1 and not self.turns_part:
            raise ValueError(f"partial_rotary_factor: {part} is not supported")
        if (turned := int(self.head_size * part)) < 2 or turned % 2:
            raise ValueError(f"partial_rotary_factor: {part} of {self.head_size} channels is no even number of them")
        return turned

    @property
    def activation(self) -> str:
        for field in ("hidden_activation", "hidden_act"):
            if (said := getattr(self, field)) is not None:
                if not isinstance(said, str) or said not in self.activations:
                    raise ValueError(f"{field}: {said!r} is not supported")
                return self.activations[said]
        return next(iter(self.activations.values()))

    def rope_of(self, rope: RopeFile, length: int, theta: float | None = None) -> Rope:
        if rope.full_attention or rope.sliding_attention:
            raise ValueError("rope_parameters: other ones in layers with a window are not supported")
        kind = rope.rope_type or rope.type or "default"
        theta = rope.rope_theta or theta or self.rope_theta or self.default_theta
        if kind not in KINDS:
            raise ValueError(f"rope_type: {kind!r} is not one of {', '.join(KINDS)}")
        if kind == "default":
            return Rope(theta)
        if kind == "longrope":
            return self._long_rope(rope, length, theta)
        factor = rope.needed("factor")
        if kind == "linear":
            return Rope(theta, kind, factor)
        original = rope.needed("original_max_position_embeddings")
        if kind == "yarn":
            return _yarn(rope, theta, factor, original)
        low, high = rope.needed("low_freq_factor"), rope.needed("high_freq_factor")
        if low == high:
            raise ValueError(f"high_freq_factor: must not be low_freq_factor, {low}")
        return Rope(theta, kind, factor, low, high, original)

    def _long_rope(self, rope: RopeFile, length: int, theta: float) -> Rope:
        """Returns a longrope. If contexts may become long, short ones use the long factors too: cached keys are not
        rotated again."""
        original = self.original_max_position_embeddings or rope.original_max_position_embeddings
        if original is None or original < 2:
            raise ValueError("original_max_position_embeddings is missing")
        name = "long_factor" if length > original else "short_factor"
        factors = rope.needed(name)
        if len(factors) != self.rotary_dim // 2:
            raise ValueError(f"{name}: {len(factors)} numbers, where {self.rotary_dim // 2} pairs are turned")
        stretched = max(1.0, rope.factor or self.max_position_embeddings / original)
        factor = rope.attention_factor or math.sqrt(1 + math.log(stretched) / math.log(original))
        return Rope(theta, "longrope", factors=tuple(factors), attention_factor=factor)


def _yarn(rope: RopeFile, theta: float, factor: float, original: int) -> Rope:
    if theta == 1:
        raise ValueError("rope_theta: 1 turns nothing")
    attention = rope.attention_factor
    if attention is None and rope.mscale and rope.mscale_all_dim:
        attention = yarn_scale(factor, rope.mscale) / yarn_scale(factor, rope.mscale_all_dim)
    return Rope(
        theta, "yarn", factor, original_max_position=original, beta_fast=rope.beta_fast or 32.0,
        beta_slow=rope.beta_slow or 1.0, whole_pairs=rope.truncate,
        attention_factor=yarn_scale(factor) if attention is None else attention,
    )  # fmt: skip


def yarn_scale(factor: float, by: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * by * math.log(factor) + 1
