"""Tiny models of every family, made with transformers, and short ways to run an engine on them."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tandem import native
from tandem.engine import Engine, EngineConfig, Request, SampledToken, SamplingParams, SequenceOutput

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
    return "avx512_bf16" in Path("/proc/cpuinfo").read_text() and bool(native.compilers())


def can_amx() -> bool:
    """Asked of the machine: its CPU has AMX, and Linux lends this process the tiles (arch_prctl)."""
    system_call, ask_for_state, tiles = 158, 0x1023, 18
    has = "amx_bf16" in Path("/proc/cpuinfo").read_text()
    return has and ctypes.CDLL(None).syscall(system_call, ask_for_state, tiles) == 0
