"""Conversion of a GGUF file's metadata to a Hugging Face `config.json`; what cannot be served is refused by name."""

from __future__ import annotations

from typing import Any

from tandem.checkpoints.gguf.metadata import Metadata

FAMILIES = ("llama", "qwen2", "qwen3")
ELSE = ": serve the model's safetensors"
KNOWN = ", ".join(FAMILIES) + ELSE
# Llama 3's frequency scaling, of which the file has only the factors: the parameters follow from the largest factor.
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
FREQUENCIES = "rope_freqs.weight"
# For each key of general.sampling: its name in `generation_config.json`, and the default of llama.cpp, for which such
# files are made.
USUAL = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
SAMPLING = {"temperature": "temp", "top_p": "top_p", "min_p": "min_p", "repetition_penalty": "penalty_repeat"}


def config_of(metadata: Metadata, frequency_factor: float | None, all_float32: bool) -> dict[str, Any]:
    """Returns the content of config.json.

    Args:
        frequency_factor: the largest number of the tensor `rope_freqs.weight`; None without this tensor.
        all_float32: all tensors are float32.

    Raises:
        ValueError: the file lacks a field, or a value is not supported.
    """
    family = metadata.need("general.architecture", str)
    if family not in FAMILIES:
        raise ValueError(f"{metadata.file}: general.architecture {family!r} is not one of {KNOWN}")
    if metadata.get(f"{family}.expert_count", int):
        raise ValueError(f"{metadata.file}: {family}.expert_count: mixtures of experts are not supported{ELSE}")
    heads = metadata.need(f"{family}.attention.head_count", int)
    hidden = metadata.need(f"{family}.embedding_length", int)
    head_dim = metadata.get(f"{family}.attention.key_length", int) or hidden // max(heads, 1)
    if (rotated := metadata.get(f"{family}.rope.dimension_count", int)) not in (None, head_dim):
        raise ValueError(f"{metadata.file}: {family}.rope.dimension_count {rotated} is not a head's {head_dim} numbers")
    window = metadata.get(f"{family}.attention.sliding_window", int)
    return {
        "model_type": "mistral" if family == "llama" and window else family,
        "vocab_size": len(metadata.need("tokenizer.ggml.tokens", list[Any])),
        "hidden_size": hidden,
        "intermediate_size": metadata.need(f"{family}.feed_forward_length", int),
        "num_hidden_layers": _num_layers(metadata, family),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.get(f"{family}.attention.head_count_kv", int) or heads,
        "head_dim": head_dim,
        "rms_norm_eps": metadata.need(f"{family}.attention.layer_norm_rms_epsilon", float),
        "max_position_embeddings": metadata.need(f"{family}.context_length", int),
        "rope_parameters": _rope(metadata, family, frequency_factor),
        "attention_bias": "blk.0.attn_q.bias" in metadata.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in metadata.tensors,
        "sliding_window": window or None,
        "use_sliding_window": bool(window),
        "tie_word_embeddings": "output.weight" not in metadata.tensors,
        "dtype": "float32" if all_float32 else "bfloat16",
    }


def generation_of(metadata: Metadata) -> dict[str, Any]:
    """Returns the content of generation_config.json: end-of-text ids, and the file's sampling parameters."""
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    ends = dict.fromkeys(metadata.get(f"tokenizer.ggml.{key}", int) for key in keys)
    said: dict[str, float | None] = {"top_k": metadata.get("general.sampling.top_k", int)}
    said |= {name: metadata.get(f"general.sampling.{key}", float) for name, key in SAMPLING.items()}
    sampling = {name: value for name, value in said.items() if value is not None}
    return {"eos_token_id": [end for end in ends if end is not None], **USUAL, **sampling}


def _num_layers(metadata: Metadata, family: str) -> int:
    count = metadata.need(f"{family}.block_count", int)
    if count > len(metadata.tensors):
        raise ValueError(f"{metadata.file}: {family}.block_count: {count} blocks need more tensors than there are")
    return count


def _rope(metadata: Metadata, family: str, frequency_factor: float | None) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_theta": metadata.get(f"{family}.rope.freq_base", float) or 10000.0}
    kind = metadata.get(f"{family}.rope.scaling.type", str) or "none"
    if frequency_factor is not None:
        return rope | LLAMA3 | {"rope_type": "llama3", "factor": frequency_factor}
    if kind == "linear":
        return rope | {"rope_type": "linear", "factor": metadata.need(f"{family}.rope.scaling.factor", float)}
    if kind != "none":
        raise ValueError(f"{metadata.file}: {family}.rope.scaling.type {kind!r} is not one of none, linear")
    return rope | {"rope_type": "default"}
