"""Families with experts: Mixtral, Qwen's, gpt-oss, DeepSeek's."""

from __future__ import annotations

import math
from typing import Annotated, Any, ClassVar

from pydantic import Field

from tandem.engine.models.config import ExpertsConfig, LatentConfig
from tandem.engine.models.config_file import ConfigFile, Count, Positive, Size, yarn_scale
from tandem.engine.models.families.dense import Qwen2File
from tandem.engine.models.mlp import CLAMPED_BOUND, CLAMPED_SLOPE, FUSED


class MixtralFile(ConfigFile):
    default_theta: ClassVar[float] = 1_000_000.0
    rms_norm_eps: Positive = 1e-5
    num_local_experts: Count = 8
    num_experts_per_tok: Count = 2

    def is_sliding(self, layer: int) -> bool:
        return True

    def facts(self) -> dict[str, Any]:
        experts = ExpertsConfig(
            self.num_local_experts, at_most(self.num_experts_per_tok, self.num_local_experts), self.intermediate_size,
            frozenset(range(self.num_hidden_layers)), "block_sparse_moe", parts=("w1", "w3", "w2"), is_normed=True,
        )  # fmt: skip
        return {"experts": experts}


class Qwen2MoeFile(Qwen2File):
    num_experts: Count | None = None
    num_local_experts: Count | None = None  # the name of num_experts in transformers 5
    num_experts_per_tok: Count = 4
    moe_intermediate_size: Size = 1408
    shared_expert_intermediate_size: Annotated[int, Field(ge=0, le=2**22)] = 5632
    norm_topk_prob: bool = False
    decoder_sparse_step: Count = 1
    mlp_only_layers: Annotated[list[int], Field(max_length=2**12)] | None = None
    qkv_bias: bool | None = True

    def facts(self) -> dict[str, Any]:
        return {"qkv_bias": bool(self.qkv_bias), "experts": self.experts(self.shared_expert_intermediate_size)}

    def experts(self, shared_inner: int) -> ExpertsConfig:
        count = self.num_experts or self.num_local_experts or 60
        layers = frozenset(
            layer for layer in range(self.num_hidden_layers)
            if layer not in (self.mlp_only_layers or ()) and (layer + 1) % self.decoder_sparse_step == 0
        )  # fmt: skip
        return ExpertsConfig(
            count, at_most(self.num_experts_per_tok, count), self.moe_intermediate_size, layers,
            is_normed=self.norm_topk_prob, shared_inner=shared_inner, shared_name="shared_expert", has_shared_gate=True,
        )  # fmt: skip


class Qwen3MoeFile(Qwen2MoeFile):
    head_dim: Count | None = 128
    attention_bias: bool | None = None

    def facts(self) -> dict[str, Any]:
        biased = bool(self.attention_bias)
        return {"qkv_bias": biased, "o_bias": biased, "qk_norm": True, "experts": self.experts(0)}


class GptOssFile(ConfigFile):
    default_theta: ClassVar[float] = 150_000.0
    rms_norm_eps: Positive = 1e-5
    head_dim: Count | None = 64
    attention_bias: bool | None = True
    sliding_window: Annotated[int, Field(ge=0, le=2**31)] | None = 128
    num_local_experts: Count = 128
    num_experts_per_tok: Count = 4
    swiglu_limit: float = CLAMPED_BOUND
    swiglu_alpha: float = CLAMPED_SLOPE

    def is_sliding(self, layer: int) -> bool:
        return layer % 2 == 0

    def facts(self) -> dict[str, Any]:
        for field, served in (("swiglu_limit", CLAMPED_BOUND), ("swiglu_alpha", CLAMPED_SLOPE)):
            if getattr(self, field) != served:
                raise ValueError(f"{field}: {getattr(self, field)} is not supported")
        experts = ExpertsConfig(
            self.num_local_experts, at_most(self.num_experts_per_tok, self.num_local_experts), self.intermediate_size,
            frozenset(range(self.num_hidden_layers)), router_name="router", parts=FUSED, is_stacked=True,
            scoring="chosen", router_bias=True,
        )  # fmt: skip
        biased = bool(self.attention_bias)
        return {
            "qkv_bias": biased, "o_bias": biased, "mlp_bias": True, "activation": "clamped_swiglu",
            "attention_sinks": True, "experts": experts,
        }  # fmt: skip


class DeepseekV2File(ConfigFile):
    """DeepSeek-V2 and V2-Lite. The cache holds latents, so head_dim is set by the latent, not by the heads."""

    kv_lora_rank: Size = 512
    q_lora_rank: Size | None = None
    qk_nope_head_dim: Count = 128
    qk_rope_head_dim: Count = 64
    v_head_dim: Count = 128
    attention_bias: bool | None = None
    mlp_bias: bool | None = None
    n_routed_experts: Count | None = None
    num_local_experts: Count | None = None
    n_shared_experts: Annotated[int, Field(ge=0, le=2**12)] | None = None
    num_experts_per_tok: Count | None = None
    moe_intermediate_size: Size = 1408
    first_k_dense_replace: Annotated[int, Field(ge=0, le=2**12)] = 0
    moe_layer_freq: Count = 1
    n_group: Count | None = None
    topk_group: Count | None = None
    topk_method: str = "greedy"
    scoring_func: str | None = None
    norm_topk_prob: bool = False
    routed_scaling_factor: Positive = 1.0

    @property
    def kv_heads(self) -> int:
        return 1

    @property
    def head_size(self) -> int:
        if self.qk_rope_head_dim % 2 or (self.kv_lora_rank + self.qk_rope_head_dim) % 4:
            problem = f"{self.kv_lora_rank}, and qk_rope_head_dim {self.qk_rope_head_dim}, are no two even halves"
            raise ValueError(f"kv_lora_rank: {problem}")
        return (self.kv_lora_rank + self.qk_rope_head_dim) // 2

    def facts(self) -> dict[str, Any]:
        biased = bool(self.attention_bias)
        return {
            "qkv_bias": biased, "o_bias": biased, "mlp_bias": bool(self.mlp_bias), "rope_interleaved": True,
            "attention_scale": self._scale, "experts": self.experts(),
            "latent": LatentConfig(
                self.kv_lora_rank, self.qk_rope_head_dim, self.qk_nope_head_dim, self.v_head_dim, self.q_lora_rank or 0
            ),
        }  # fmt: skip

    @property
    def _scale(self) -> float:
        rope = self.rope_parameters or self.rope_scaling
        scale = 1 / math.sqrt(self.qk_nope_head_dim + self.qk_rope_head_dim)
        if rope is None or (rope.rope_type or rope.type or "default") == "default" or not rope.mscale_all_dim:
            return scale
        more = yarn_scale(rope.needed("factor"), rope.mscale_all_dim)
        return scale * more * more

    def experts(self) -> ExpertsConfig:
        if self.norm_topk_prob or self.scoring_func not in (None, "softmax"):
            field = "norm_topk_prob" if self.norm_topk_prob else "scoring_func"
            raise ValueError(f"{field}: {getattr(self, field)} is not supported")
        if self.topk_method not in ("greedy", "group_limited_greedy"):
            raise ValueError(f"topk_method: {self.topk_method!r} is not supported")
        return self._experts(self.topk_method != "greedy", scale=self.routed_scaling_factor)

    def _experts(self, is_grouped: bool, **facts: Any) -> ExpertsConfig:
        count = self.n_routed_experts or self.num_local_experts or 64
        groups, chosen = (self.n_group or 1, self.topk_group or 1) if is_grouped else (1, 1)
        if (
            count % groups
            or not chosen <= groups
            or at_most(self.num_experts_per_tok or 1, count // groups * chosen) < 1
        ):
            raise ValueError(f"n_group: {groups} groups, of which {chosen} are chosen, of {count} experts")
        if self.moe_layer_freq != 1:
            raise ValueError(f"moe_layer_freq: {self.moe_layer_freq} is not supported")
        return ExpertsConfig(
            count, self.num_experts_per_tok or 1, self.moe_intermediate_size,
            frozenset(range(self.first_k_dense_replace, self.num_hidden_layers)), has_wide_router=True, groups=groups,
            chosen_groups=chosen, shared_inner=(self.n_shared_experts or 0) * self.moe_intermediate_size,
            shared_name="shared_experts", **facts,
        )  # fmt: skip


class DeepseekV3File(DeepseekV2File):
    """DeepSeek-V3 and R1. Layers after the last, which predict further tokens, are not used."""

    q_lora_rank: Size | None = 1536
    moe_intermediate_size: Size = 2048
    first_k_dense_replace: Annotated[int, Field(ge=0, le=2**12)] = 3
    n_shared_experts: Annotated[int, Field(ge=0, le=2**12)] | None = 1
    num_experts_per_tok: Count | None = 8
    n_group: Count | None = 8
    topk_group: Count | None = 4
    norm_topk_prob: bool = True
    routed_scaling_factor: Positive = 2.5
    topk_method: str = "noaux_tc"
    rope_interleave: bool | None = True

    def facts(self) -> dict[str, Any]:
        return super().facts() | {"rope_interleaved": self.rope_interleave is not False}

    def experts(self) -> ExpertsConfig:
        if self.topk_method != "noaux_tc" or self.scoring_func not in (None, "sigmoid"):
            raise ValueError(f"topk_method: {self.topk_method!r}, scoring_func {self.scoring_func!r} are not supported")
        return self._experts(
            True, scoring="sigmoid", is_normed=self.norm_topk_prob, norm_floor=1e-20, of_group=2, has_correction=True,
            scale=self.routed_scaling_factor,
        )  # fmt: skip


def at_most(per_token: int, count: int) -> int:
    if per_token > count:
        raise ValueError(f"num_experts_per_tok: {per_token}, of {count} experts")
    return per_token
