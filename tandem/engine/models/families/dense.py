"""Families without experts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field

from tandem.engine.models.config import Rope
from tandem.engine.models.config_file import ConfigFile, Count, Positive, RopeFile, Size

Softcap = Annotated[float, Field(ge=0, le=1e6)]
SANDWICH = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
GELU = {"gelu_pytorch_tanh": "gelu_tanh"}


class LlamaFile(ConfigFile):
    attention_bias: bool | None = None
    mlp_bias: bool | None = None

    def facts(self) -> dict[str, Any]:
        biased = bool(self.attention_bias)
        return {"qkv_bias": biased, "o_bias": biased, "mlp_bias": bool(self.mlp_bias)}


class MistralFile(ConfigFile):
    sliding_window: Annotated[int, Field(ge=0, le=2**31)] | None = 4096  # the default if config.json omits the field

    def is_sliding(self, layer: int) -> bool:
        return True


class Qwen2File(ConfigFile):
    use_sliding_window: bool | None = None
    max_window_layers: Annotated[int, Field(ge=0, le=2**12)] = 28

    def is_sliding(self, layer: int) -> bool:
        return layer >= self.max_window_layers

    def windows(self, length: int) -> tuple[int, ...]:
        return super().windows(length) if self.use_sliding_window else ()

    def facts(self) -> dict[str, Any]:
        return {"qkv_bias": True}


class Qwen3File(Qwen2File):
    head_dim: Count | None = 128
    attention_bias: bool | None = None

    def facts(self) -> dict[str, Any]:
        return {"qkv_bias": bool(self.attention_bias), "o_bias": bool(self.attention_bias), "qk_norm": True}


class Phi3File(ConfigFile):
    """Phi-3 and Phi-4. With longrope, a context length beyond the original one selects the long factors."""

    turns_part: ClassVar[bool] = True
    rms_norm_eps: Positive = 1e-5
    original_max_position_embeddings: Size | None = 4096

    def is_sliding(self, layer: int) -> bool:
        return True

    def ropes(self, length: int) -> tuple[Rope, Rope | None]:
        said = self.rope_parameters or self.rope_scaling or RopeFile()
        kind = said.rope_type or said.type
        return self.rope_of(said.model_copy(update={"rope_type": "longrope"}) if kind == "su" else said, length), None

    def facts(self) -> dict[str, Any]:
        return {"fused_qkv": True, "fused_gate_up": True}


class Olmo2File(ConfigFile):
    norm_names: ClassVar[tuple[str, str, str, str]] = ("", SANDWICH[1], "", SANDWICH[3])
    rms_norm_eps: Positive = 1e-5
    attention_bias: bool | None = None

    def facts(self) -> dict[str, Any]:
        biased = bool(self.attention_bias)
        return {"qkv_bias": biased, "o_bias": biased, "qk_norm": True, "qk_norm_of_all": True}


class GraniteFile(LlamaFile):
    embedding_multiplier: Positive = 1.0
    attention_multiplier: Positive = 1.0
    residual_multiplier: Positive = 1.0
    logits_scaling: Positive = 1.0

    def facts(self) -> dict[str, Any]:
        return super().facts() | {
            "embed_scale": self.embedding_multiplier, "attention_scale": self.attention_multiplier,
            "residual_scale": self.residual_multiplier, "logits_divisor": self.logits_scaling,
        }  # fmt: skip


class SmolLM3File(LlamaFile):
    """SmolLM3: every fourth layer rotates nothing; only these layers can have a window."""

    default_theta: ClassVar[float] = 2_000_000.0
    tie_word_embeddings: bool | None = True
    no_rope_layers: Annotated[list[int], Field(max_length=2**12)] | None = None  # for each layer: 1 if it rotates
    no_rope_layer_interval: Count = 4
    use_sliding_window: bool | None = None

    def is_sliding(self, layer: int) -> bool:
        return not self._turns(layer)

    def windows(self, length: int) -> tuple[int, ...]:
        return super().windows(length) if self.use_sliding_window else ()

    def _turns(self, layer: int) -> bool:
        if self.no_rope_layers is None:
            return (layer + 1) % self.no_rope_layer_interval != 0
        return bool(self.no_rope_layers[layer])

    def facts(self) -> dict[str, Any]:
        if self.no_rope_layers is not None and len(self.no_rope_layers) < self.num_hidden_layers:
            raise ValueError(f"no_rope_layers: {len(self.no_rope_layers)} of {self.num_hidden_layers} layers")
        still = frozenset(layer for layer in range(self.num_hidden_layers) if not self._turns(layer))
        return super().facts() | {"layers_without_rope": still}


class GlmFile(ConfigFile):
    turns_part: ClassVar[bool] = True
    rms_norm_eps: Positive = 1.5625e-07
    head_dim: Count | None = 128
    partial_rotary_factor: Annotated[float, Field(gt=0, le=1)] | None = 0.5
    attention_bias: bool | None = True

    def facts(self) -> dict[str, Any]:
        return {"qkv_bias": bool(self.attention_bias), "fused_gate_up": True, "rope_interleaved": True}


class Glm4File(GlmFile):
    norm_names: ClassVar[tuple[str, str, str, str]] = (
        "input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm",
    )  # fmt: skip


class CohereFile(ConfigFile):
    """Command-R: attention and MLP read one norm's output, and norms subtract the mean."""

    default_theta: ClassVar[float] = 500_000.0
    norm_names: ClassVar[tuple[str, str, str, str]] = ("input_layernorm", "", "", "")
    rms_norm_eps: Annotated[float, Field(gt=0, le=1e12, validation_alias="layer_norm_eps")] = 1e-5
    tie_word_embeddings: bool | None = True
    attention_bias: bool | None = None
    logit_scale: Positive = 0.0625
    use_qk_norm: bool | None = None

    def facts(self) -> dict[str, Any]:
        if self.use_qk_norm:
            raise ValueError("use_qk_norm: true is not supported")
        biased = bool(self.attention_bias)
        return {
            "qkv_bias": biased, "o_bias": biased, "rope_interleaved": True, "norms_centered": True, "is_parallel": True,
            "logits_divisor": 1 / self.logit_scale,
        }  # fmt: skip


class Gemma2File(ConfigFile):
    activations: ClassVar[Mapping[str, str]] = GELU
    norm_names: ClassVar[tuple[str, str, str, str]] = SANDWICH
    head_dim: Count | None = 256
    tie_word_embeddings: bool | None = True
    attention_bias: bool | None = None
    query_pre_attn_scalar: Positive = 256
    sliding_window: Annotated[int, Field(ge=0, le=2**31)] | None = 4096
    attn_logit_softcapping: Softcap | None = 50.0
    final_logit_softcapping: Softcap | None = 30.0
    use_bidirectional_attention: bool | None = None

    def is_sliding(self, layer: int) -> bool:
        return layer % 2 == 0

    def facts(self) -> dict[str, Any]:
        if self.use_bidirectional_attention:
            raise ValueError("use_bidirectional_attention: true is not supported")
        biased = bool(self.attention_bias)
        return {
            "norms_from_one": True, "embed_scale": math.sqrt(self.hidden_size), "qkv_bias": biased, "o_bias": biased,
            "attention_scale": self.query_pre_attn_scalar**-0.5,
            "attention_softcap": self.attn_logit_softcapping or 0.0,
            "logits_softcap": self.final_logit_softcapping or 0.0,
        }  # fmt: skip


class Gemma3File(Gemma2File):
    """Gemma 3: layers with a window have their own rotary frequencies; only the other layers stretch positions."""

    default_theta: ClassVar[float] = 1_000_000.0
    attn_logit_softcapping: Softcap | None = None
    final_logit_softcapping: Softcap | None = None
    sliding_window_pattern: Count = 6
    rope_local_base_freq: Positive = 10_000.0

    def is_sliding(self, layer: int) -> bool:
        return (layer + 1) % self.sliding_window_pattern != 0

    @property
    def longest(self) -> int:
        return self.max_position_embeddings

    def ropes(self, length: int) -> tuple[Rope, Rope | None]:
        said = self.rope_parameters or RopeFile()
        whole = said.full_attention or self.rope_scaling or RopeFile()
        return self.rope_of(whole, length), self.rope_of(
            said.sliding_attention or RopeFile(), length, self.rope_local_base_freq
        )

    def facts(self) -> dict[str, Any]:
        return super().facts() | {"qk_norm": True, "local_layers": self.sliding_layers}
