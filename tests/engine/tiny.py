"""Tiny models of every family, made with transformers, and short ways to run an engine on them."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Glm4Config,
    Glm4ForCausalLM,
    GlmConfig,
    GlmForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

from tandem.engine import Engine, EngineConfig, Request, SampledToken, SamplingParams, SequenceOutput
from tandem.machine import native

VOCAB = 96
MAX_LEN = 128
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": MAX_LEN, "bos_token_id": 0, "eos_token_id": 1,
    "pad_token_id": None,
}  # fmt: skip
BLOCK_BYTES = 3 * 2 * 2 * 4 * 8 * 4  # layers, K and V, heads, tokens, numbers a head, bytes: of a float32 engine
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
LONG_ROPE = {
    "rope_type": "longrope", "rope_theta": 100.0, "short_factor": [1.0, 1.1, 1.2], "long_factor": [1.5, 2.0, 3.0],
    "partial_rotary_factor": 0.75, "factor": 4.0,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 4.0,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LATENT: dict[str, Any] = {
    **SIZES, "num_key_value_heads": 4,
    "kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10, "n_routed_experts": 8,
    "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_shared_experts": 2, "first_k_dense_replace": 1,
}  # fmt: skip
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}

FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "llama2": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "llama3": lambda: LlamaForCausalLM(
        LlamaConfig(**SIZES, rope_parameters=LLAMA3_ROPE, tie_word_embeddings=True, rms_norm_eps=1e-5)
    ),
    "llama-biased": lambda: LlamaForCausalLM(
        LlamaConfig(**SIZES, rope_parameters=LINEAR_ROPE, attention_bias=True, mlp_bias=True)
    ),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=None)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=True)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=16)),
    "mistral-window": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=8)),
    "qwen2-window": lambda: Qwen2ForCausalLM(
        Qwen2Config(**SIZES, sliding_window=9, use_sliding_window=True, max_window_layers=1)
    ),
    "qwen3-yarn": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=16, rope_parameters=YARN)),
    "phi3": lambda: Phi3ForCausalLM(Phi3Config(**SIZES)),
    "phi4-mini": lambda: Phi3ForCausalLM(
        Phi3Config(**SIZES, rope_parameters=LONG_ROPE, original_max_position_embeddings=MAX_LEN)
    ),
    "olmo2": lambda: Olmo2ForCausalLM(Olmo2Config(**SIZES)),
    "granite": lambda: GraniteForCausalLM(
        GraniteConfig(
            **SIZES, embedding_multiplier=12.0, attention_multiplier=0.2, residual_multiplier=0.22, logits_scaling=0.5
        )
    ),
    "smollm3": lambda: SmolLM3ForCausalLM(
        SmolLM3Config(**SIZES, no_rope_layer_interval=2, use_sliding_window=True, sliding_window=11)
    ),
    "glm": lambda: GlmForCausalLM(GlmConfig(**SIZES, head_dim=16)),
    "glm4": lambda: Glm4ForCausalLM(Glm4Config(**SIZES, head_dim=16)),
    "gemma2": lambda: Gemma2ForCausalLM(
        Gemma2Config(**SIZES, head_dim=16, query_pre_attn_scalar=24, sliding_window=8, attn_logit_softcapping=5.0)
    ),
    "gemma3": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(
            **SIZES,
            head_dim=16,
            query_pre_attn_scalar=24,
            sliding_window=8,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            rope_parameters={"full_attention": LINEAR_ROPE, "sliding_attention": {"rope_type": "default"}},
        )
    ),
    "cohere": lambda: CohereForCausalLM(CohereConfig(**SIZES, logit_scale=0.3, attention_bias=True)),
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=6, num_experts_per_tok=2)),
    "qwen2-moe": lambda: Qwen2MoeForCausalLM(
        Qwen2MoeConfig(**SIZES, **EXPERTS, shared_expert_intermediate_size=40, mlp_only_layers=[1])
    ),
    "qwen3-moe": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**{**SIZES, **EXPERTS, "head_dim": 16}, norm_topk_prob=True)
    ),
    "gpt-oss": lambda: GptOssForCausalLM(
        GptOssConfig(
            **{**SIZES, "intermediate_size": 64},
            head_dim=16,
            num_local_experts=6,
            num_experts_per_tok=2,
            sliding_window=8,
            rope_parameters=YARN | {"truncate": False},
        )
    ),
    "deepseek-v2-lite": lambda: DeepseekV2ForCausalLM(DeepseekV2Config(**LATENT, q_lora_rank=None)),
    "deepseek-v2": lambda: DeepseekV2ForCausalLM(
        DeepseekV2Config(
            **LATENT,
            q_lora_rank=20,
            topk_method="group_limited_greedy",
            n_group=4,
            topk_group=2,
            routed_scaling_factor=4.0,
            rope_parameters=YARN | {"mscale": 0.7, "mscale_all_dim": 0.7},
        )
    ),
    "deepseek-v3": lambda: DeepseekV3ForCausalLM(
        DeepseekV3Config(
            **LATENT,
            q_lora_rank=20,
            n_group=4,
            topk_group=2,
            rope_parameters=YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
        )
    ),
}

# A transformers model by family name, and the folder it is saved in.
Families = Callable[[str], tuple[PreTrainedModel, Path]]


def make(family: str) -> PreTrainedModel:
    """A random model whose every tensor matters and whose logits are far apart."""
    torch.manual_seed(7)
    model = FAMILIES[family]()
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            tensor.copy_(torch.randn_like(tensor) * 0.3 + (1.0 if "norm" in name else 0.0))
    return model


def make_engine(path: Path, now: Callable[[], float] = time.monotonic, **config: Any) -> Engine:
    settings = {"dtype": "float32", "num_blocks": 64, "block_size": 4, "max_num_batched_tokens": 16, "max_num_seqs": 8}
    return Engine(EngineConfig(model_path=path, model_name="tiny", **{**settings, **config}), now=now)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(2, VOCAB, (length,), generator=generator).tolist()
    return ids


def greedy(max_tokens: int, **params: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, **params)


def run(engine: Engine, max_steps: int = 2000) -> dict[str, list[SequenceOutput]]:
    """Step until nothing is left, checking the engine's integrity at each; outputs by request id."""
    outputs: dict[str, list[SequenceOutput]] = {}
    for _ in range(max_steps):
        if not engine.has_work():
            return outputs
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
        engine.check_integrity()
    raise AssertionError(f"work left after {max_steps} steps: {engine.stats()}")


def tokens(outputs: Iterable[SequenceOutput]) -> list[int]:
    return [token.token_id for token in sampled(outputs)]


def sampled(outputs: Iterable[SequenceOutput]) -> list[SampledToken]:
    return [token for output in outputs for token in output.tokens]


def generate(engine: Engine, prompt: Sequence[int], sampling: SamplingParams) -> list[int]:
    """The answer to one request on an idle engine."""
    engine.add(Request("generate", list(prompt), sampling))
    return tokens(run(engine)["generate"])


def assert_idle(engine: Engine) -> None:
    stats = engine.stats()
    assert (stats.num_waiting, stats.num_running, stats.num_reserved, stats.queued_tokens) == (0, 0, 0, 0)
    assert stats.free_blocks == stats.num_blocks
    engine.check_integrity()


def can_compile() -> bool:
    """Asked of the machine, not of the code under test."""
    return "avx512_bf16" in Path("/proc/cpuinfo").read_text(encoding="utf-8") and bool(native.compilers())


def can_amx() -> bool:
    """Asked of the machine: its CPU has AMX, and Linux lends this process the tiles (arch_prctl)."""
    system_call, ask_for_state, tiles = 158, 0x1023, 18
    has = "amx_bf16" in Path("/proc/cpuinfo").read_text(encoding="utf-8")
    return has and ctypes.CDLL(None).syscall(system_call, ask_for_state, tiles) == 0
