"""GGUF files of tiny models, written with the `gguf` package, and the models that hold the numbers as it opens them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
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

from tandem.vocabulary import BYTE_OF

WORDS = ["<|begin|>", "<|end|>", *BYTE_OF, "he", "ll", "hell", "hello"]
MERGES = ["h e", "l l", "he ll", "hell o"]
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
SIZES: dict[str, Any] = {
    "vocab_size": len(WORDS), "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "eos_token_id": 1,
    "bos_token_id": 0, "pad_token_id": None,
}  # fmt: skip
ROPE = {"rope_type": "default", "rope_theta": 777.0}
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=ROPE, tie_word_embeddings=True)),
    "mistral": lambda: MistralForCausalLM(
        MistralConfig(**SIZES, rope_parameters=ROPE, sliding_window=5, tie_word_embeddings=True)
    ),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=False)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=128, tie_word_embeddings=False)),
}
# Bytes of a block at which a half-precision number lies, of the kinds that `gguf` opens and cannot make.
HALVES = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
TURNED = {"q_proj": 4, "k_proj": 2}


def make_file(path: Path, family: str, kind: str, says: Mapping[str, Any] | None = None) -> PreTrainedModel:
    """Write a random model whose matrices are of the kind; returns one of the numbers that the file holds.

    `says`: metadata besides, or instead.
    """
    torch.manual_seed(3)
    model = MODELS[family]().float()
    architecture = "llama" if family == "mistral" else family
    writer = gguf.GGUFWriter(path, architecture)
    _say(writer, model, says or {})
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], SIZES["num_hidden_layers"])
    tied = model.config.tie_word_embeddings
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if tied and name == "lm_head.weight":
                continue
            tensor.copy_(torch.randn_like(tensor) * 0.3 + (1.0 if "norm" in name else 0.0))
            place = names.get_name(name, try_suffixes=(".weight", ".bias"))
            heads = TURNED.get(name.split(".")[-2]) if architecture == "llama" else None
            tensor.copy_(_write(writer, place, tensor, kind if tensor.dim() > 1 else "F32", heads))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _write(writer: Any, place: str, tensor: torch.Tensor, kind: str, heads: int | None) -> torch.Tensor:
    """Returns the numbers that were written."""
    numbers = tensor.float().numpy()
    if heads:  # by halves here, by neighbours there
        numbers = numbers.reshape(heads, 2, -1, *numbers.shape[1:]).swapaxes(1, 2).reshape(numbers.shape)
    data = _random_blocks(numbers, kind) if kind in HALVES else gguf.quants.quantize(numbers, Kind[kind])
    writer.add_tensor(place, data, raw_dtype=Kind[kind])
    opened = gguf.quants.dequantize(data, Kind[kind]).reshape(numbers.shape)
    if heads:
        opened = opened.reshape(heads, -1, 2, *numbers.shape[1:]).swapaxes(1, 2).reshape(numbers.shape)
    return torch.from_numpy(np.ascontiguousarray(opened))


def _random_blocks(numbers: Any, kind: str) -> Any:
    size, nbytes = gguf.GGML_QUANT_SIZES[Kind[kind]]
    dice = np.random.default_rng(numbers.size)
    data = dice.integers(0, 256, (len(numbers), numbers.shape[1] // size, nbytes), dtype=np.uint8)
    for at in HALVES[kind]:
        halves = (dice.normal(size=data.shape[:2]) * 0.0008).astype(np.float16)
        data[..., at : at + 2] = halves[..., None].view(np.uint8)
    return data.reshape(len(numbers), -1)


def _say(writer: Any, model: PreTrainedModel, says: Mapping[str, Any]) -> None:
    config = model.config
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_key_length(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    if config.model_type == "mistral":
        writer.add_sliding_window(config.sliding_window)
    types = [gguf.TokenType.CONTROL] * 2 + [gguf.TokenType.NORMAL] * (len(WORDS) - 2)
    said = {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "qwen2", "tokenizer.ggml.tokens": WORDS,
        "tokenizer.ggml.token_type": [int(kind) for kind in types], "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 0, "tokenizer.ggml.eos_token_id": 1, "tokenizer.chat_template": TEMPLATE,
        **says,
    }  # fmt: skip
    for key, value in said.items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif value is not None:
            writer.add_array(key, value)
