"""The CPU kernels compute each family that they know as torch does."""

from __future__ import annotations

import ctypes
import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    Glm4Config,
    GptOssConfig,
    GraniteConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
    SmolLM3Config,
)

from tandem.engine.forward.forward import Near, StepInput, TorchForward
from tandem.engine.kernels import CpuForward
from tandem.engine.kv.kv_cache import row_size
from tandem.engine.models import Decoder, Experts, ModelConfig, read_model_config
from tandem.engine.quantization.mxfp4 import Mxfp4
from tests.engine.test_kernels import STEPS, WIDE, Sizes, fill, quantize_model, steps
from tests.engine.tiny import LINEAR_ROPE, YARN

SIZES = WIDE | {"max_position_embeddings": 512}
# As Gemma 3 of 270 million parameters has them.
WIDE_HEADS = SIZES | {"head_dim": 256, "num_attention_heads": 4, "num_key_value_heads": 1}
TWO_HEADS = {"hidden_size": 128, "num_attention_heads": 2, "head_dim": 64}
LONG_ROPE = {
    "rope_type": "longrope", "rope_theta": 100.0, "short_factor": [1 + 0.1 * i for i in range(16)],
    "long_factor": [1 + 0.2 * i for i in range(16)], "partial_rotary_factor": 0.5, "factor": 4.0,
}  # fmt: skip
EXPERTS = {"num_experts": 40, "num_experts_per_tok": 4, "moe_intermediate_size": 48}
FAMILIES: dict[str, Callable[[], PretrainedConfig]] = {
    "mistral": lambda: MistralConfig(**SIZES, sliding_window=20),
    "mistral, a window over many keys": lambda: MistralConfig(**SIZES, sliding_window=150),
    "mixtral": lambda: MixtralConfig(**SIZES, num_local_experts=5, num_experts_per_tok=3),
    "qwen3-moe": lambda: Qwen3MoeConfig(**SIZES, **EXPERTS, norm_topk_prob=True),
    "qwen2-moe": lambda: Qwen2MoeConfig(**SIZES, **EXPERTS, shared_expert_intermediate_size=96, mlp_only_layers=[1]),
    "gpt-oss": lambda: GptOssConfig(
        **SIZES | {"intermediate_size": 96},
        num_local_experts=9,
        num_experts_per_tok=4,
        sliding_window=40,
        rope_parameters=YARN | {"truncate": False},
    ),
    "granite": lambda: GraniteConfig(
        **SIZES, embedding_multiplier=12.0, attention_multiplier=0.2, residual_multiplier=0.22, logits_scaling=0.5
    ),
    "olmo2": lambda: Olmo2Config(**SIZES),
    "smollm3": lambda: SmolLM3Config(**SIZES, no_rope_layer_interval=2),
    "glm4": lambda: Glm4Config(**SIZES | {"head_dim": 64}),
    "phi4-mini": lambda: Phi3Config(**SIZES | TWO_HEADS, rope_parameters=LONG_ROPE),
    "gemma2": lambda: Gemma2Config(
        **SIZES, query_pre_attn_scalar=24, sliding_window=40, attn_logit_softcapping=5.0, final_logit_softcapping=3.0
    ),
    "gemma3": lambda: Gemma3TextConfig(
        **WIDE_HEADS,
        query_pre_attn_scalar=300,
        sliding_window=40,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters={"full_attention": LINEAR_ROPE, "sliding_attention": {"rope_type": "default"}},
    ),
    "qwen2": lambda: Qwen2Config(**SIZES, sliding_window=9, use_sliding_window=True, max_window_layers=1),
}
PASSES = [(16, 2, "none"), (7, 1, "none"), (16, 2, "int8"), (16, 3, "ordered")]
BLOCKS, GONE = 200, 199  # GONE: a block of numbers that are none


def config_of(family: str, folder: Path) -> ModelConfig:
    made = FAMILIES[family]()
    made.architectures = ["ForCausalLM"]
    made.save_pretrained(folder)
    return read_model_config(folder, None)


def models_of(config: ModelConfig, quantization: str = "none") -> tuple[Decoder, Decoder]:
    """The same weights for bfloat16 and for float32. Scores of experts are far apart, for where they are almost alike,
    rounding may choose another one."""
    made = Decoder(config, torch.bfloat16), Decoder(config, torch.float32)
    for model in made:
        fill(model, 3)
        for name, tensor in model.checkpoint_tensors().items():
            tensor.sub_(float("norm" in name and config.norms_from_one))
        for layer in model.layers:
            if isinstance(layer.mlp, Experts):
                layer.mlp.router.weight.mul_(8)
        if quantization == "mxfp4":
            pack_experts(model)
        elif quantization != "none":
            quantize_model(model, quantization)
    return made


def pack_experts(model: Decoder) -> None:
    """Numbers as checkpoints of gpt-oss have them, for each expert."""
    chance = torch.Generator().manual_seed(1)
    for linear in (part for layer in model.layers for part in layer.mlp.linears()):
        outputs, inputs = linear.weight.shape
        blocks = torch.randint(0, 256, (outputs, inputs // 32, 16), dtype=torch.uint8, generator=chance)
        scales = torch.randint(119, 122, blocks.shape[:2], dtype=torch.uint8, generator=chance)
        linear.weight = Mxfp4().read({"blocks": blocks, "scales": scales}, outputs, inputs)


def cache_of(config: ModelConfig, block_size: int, dtype: torch.dtype) -> list[Tensor]:
    """One of numbers that are none, where nothing is written."""
    shape = (BLOCKS, 2, config.num_kv_heads, block_size, row_size(dtype, config.head_dim))
    made = [torch.zeros(shape, dtype=dtype) for _ in range(config.num_layers)]
    for kv in made:
        kv.fill_(0 if dtype is torch.float32 else -1 if dtype is torch.int8 else math.nan)
    return made


def sizes_of(config: ModelConfig, block_size: int) -> Sizes:
    return Sizes(config.num_heads, config.num_kv_heads, config.head_dim, block_size)


def tables_of(block_size: int) -> list[list[int]]:
    order = random.Random(0).sample(range(GONE), GONE)
    return [[order.pop() for _ in range(-(-sum(asked) // block_size))] for asked in zip(*STEPS, strict=True)]


def with_near(step: StepInput, config: ModelConfig, size: int) -> StepInput:
    """The step with other blocks for layers with a window, where those that no token sees are gone."""
    layers = frozenset(layer for layer, window in enumerate(config.windows) if window)
    if not layers:
        return step
    window = max(config.windows)
    tables, slots = list[list[int]](), list[int]()
    for table, length, count in zip(step.tables, step.lengths, step.counts, strict=True):
        hidden = max(length - count + 1 - window, 0) // size
        tables.append([GONE] * hidden + [(block + 1) % GONE for block in table[hidden:]])
        slots += [tables[-1][p // size] * size + p % size for p in range(length - count, length)]
    return replace(step, near=Near(layers, torch.tensor(slots), tables))


@pytest.mark.parametrize(
    ("family", "block_size", "threads", "quantization"),
    [*((family, *given) for family in FAMILIES for given in PASSES), ("gpt-oss", 16, 2, "mxfp4")],
)
def test_a_family_is_computed_as_torch_does(
    library: ctypes.CDLL, family: str, block_size: int, threads: int, quantization: str, tmp_path: Path
) -> None:
    """Hidden states and logits beside float32, over chunks and single tokens on scattered blocks."""
    config = config_of(family, tmp_path)
    assert not CpuForward.misfit(config)
    rounded, exact = models_of(config, quantization)
    expected = TorchForward(exact, cache_of(config, block_size, torch.float32))
    cache = cache_of(config, block_size, torch.bfloat16)
    found, errors = CpuForward(library, rounded, cache, 512, lambda: threads), list[float]()
    for step in steps(sizes_of(config, block_size), tables_of(block_size)):
        with torch.inference_mode():
            left = with_near(step, config, block_size)
            ours, theirs = found(left), expected(step)
            rows = [0, len(step.input_ids) - 1]
            errors += error(ours, theirs)
            errors += error(found.logits(ours, rows), expected.logits(theirs, rows))
    few = len(errors) // 50 if config.experts else 0
    assert sorted(errors)[-1 - few] < 0.03, sorted(errors)[-20:]
    assert (left.near is not None and GONE in left.near.tables[-1]) == any(config.windows)


def error(ours: Tensor, theirs: Tensor) -> list[float]:
    """Each row's largest error, relative to the largest number of all."""
    found: list[float] = ((ours.float() - theirs).abs().amax(dim=1) / theirs.abs().max()).tolist()
    return found


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_sequence_gets_the_same_bits_beside_others(
    library: ctypes.CDLL, family: str, threads: int, tmp_path: Path
) -> None:
    config = config_of(family, tmp_path)
    together, alone = (
        CpuForward(library, models_of(config)[0], cache_of(config, 16, torch.bfloat16), 512, lambda: threads)
        for _ in range(2)
    )
    for step in steps(sizes_of(config, 16), tables_of(16)):
        with torch.inference_mode():
            hidden, start = together(step).clone(), 0
            for number, count in enumerate(step.counts):
                here, start = slice(start, start + count), start + count
                assert torch.equal(alone(part_of(step, number, here)), hidden[here])


def part_of(step: StepInput, number: int, here: slice) -> StepInput:
    return StepInput(
        step.input_ids[here].contiguous(), step.positions[here].contiguous(), step.slots[here].contiguous(),
        step.counts[number : number + 1], step.lengths[number : number + 1], step.tables[number : number + 1],
    )  # fmt: skip


def test_experts_that_are_chosen_in_groups_are_left_to_torch(tmp_path: Path) -> None:
    config = config_of("qwen3-moe", tmp_path)
    assert config.experts is not None
    grouped = replace(config, experts=replace(config.experts, groups=2))
    assert CpuForward.misfit(grouped) == "they do not know how experts are chosen"
    assert "multiples of 32" in CpuForward.misfit(replace(config, experts=replace(config.experts, inner=40)))
