"""A model's folder as one GGUF file, which llama.cpp and OpenVINO GenAI read; and such a file opened.

Of Qwen2, Qwen3-MoE, Gemma 3 and Llama. The weights of every product are written as they are (bf16), or rounded to
float16 where a reader knows no bf16, or to the format's own 8 or 4 bits by groups of 32; norms, biases and what chooses
experts, as that format has them, in float32.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, cast

from benchmarks.models import OUT
from tandem.checkpoints import TENSORS_FILE, WEIGHTS_FILE, as_folder

WeightType = Literal["bf16", "f16", "q8_0", "q4_0"]
# Architectures that llama.cpp names otherwise than config.json does.
ARCHITECTURES = {"qwen3_moe": "qwen3moe", "gemma3_text": "gemma3"}
EMBEDDING = {"bf16": "BF16", "q8_0": "Q8_0", "q4_0": "Q8_0"}  # and the head, which these models share with it


def written(folder: Path, weights: WeightType) -> Path:
    """The file, made on the first call."""
    place = OUT / "gguf" / f"{folder.parent.name}-{folder.name}-{weights}.gguf"
    if not place.is_file():
        place.parent.mkdir(parents=True, exist_ok=True)
        half = place.with_suffix(".half")
        _write(folder, half, weights)
        os.replace(half, place)
    return place


def opened(file: Path) -> Path:
    """The folder, made on the first call, that holds in float32 what `gguf` says the file's numbers are: the truth for
    who reads such files, and for transformers, which reads no other kind without more packages."""
    place = OUT / "models" / f"{file.stem}-opened"
    if not place.is_dir():
        half = place.with_suffix(".half")
        shutil.copytree(as_folder(file), half, ignore=lambda *_: [WEIGHTS_FILE, TENSORS_FILE], dirs_exist_ok=True)
        _open(file, half)
        os.replace(half, place)
    return place


def _open(file: Path, folder: Path) -> None:
    import gguf
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config, family = AutoConfig.from_pretrained(folder), cast(Any, AutoModelForCausalLM)
    model = family.from_config(config, dtype=torch.float32)
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[config.model_type.upper()], config.num_hidden_layers)
    turned = {"q_proj.weight": config.num_attention_heads, "k_proj.weight": config.num_key_value_heads}
    with torch.no_grad():
        for name, target in model.named_parameters():
            read = tensors[str(names.get_name(name, try_suffixes=(".weight", ".bias")))]
            tensor = torch.from_numpy(gguf.dequantize(read.data, read.tensor_type).copy())
            heads = turned.get(".".join(name.split(".")[-2:]))
            if heads and config.model_type == "llama":
                tensor = tensor.reshape(heads, -1, 2, tensor.shape[-1]).transpose(1, 2).reshape(tensor.shape)
            target.copy_(tensor)
    model.save_pretrained(folder)


def _write(folder: Path, place: Path, weights: WeightType) -> None:
    import gguf

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    writer = gguf.GGUFWriter(place, _architecture(config))
    writer.add_name(folder.name)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    rope = config["rope_parameters"]
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if head_dim := config.get("head_dim"):
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if experts := config.get("num_local_experts"):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if window := config.get("sliding_window"):
        writer.add_sliding_window(window)
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{weights.upper()}"])
    _add_tokenizer(writer, json.loads((folder / "tokenizer.json").read_text(encoding="utf-8")))
    _add_weights(writer, folder, config, weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _architecture(config: dict[str, Any]) -> str:
    family = str(config["model_type"])
    return ARCHITECTURES.get(family, family)


def _joined(tensors: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields tensors by name, those of a layer's experts as one."""
    import torch

    experts: dict[str, dict[int, Any]] = defaultdict(dict)
    for name, tensor in tensors.items():
        layer, is_expert, rest = name.partition(".experts.")
        if is_expert:
            number, _, part = rest.partition(".")
            experts[f"{layer}.experts.{part}"][int(number)] = tensor
        else:
            yield name, tensor
    for name, parts in experts.items():
        yield name, torch.stack([parts[number] for number in range(len(parts))])


def _add_tokenizer(writer: Any, tokenizer: dict[str, Any]) -> None:
    import gguf

    ids = {**tokenizer["model"]["vocab"], **{token["content"]: token["id"] for token in tokenizer["added_tokens"]}}
    special = {token["id"] for token in tokenizer["added_tokens"] if token["special"]}
    words = sorted(ids, key=lambda word: int(ids[word]))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(words)
    types = (gguf.TokenType.CONTROL if ids[word] in special else gguf.TokenType.NORMAL for word in words)
    writer.add_token_types(list(types))
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_add_bos_token(False)


def _add_weights(writer: Any, folder: Path, config: dict[str, Any], weights: WeightType) -> None:
    import gguf
    from safetensors.torch import load_file

    arch = gguf.MODEL_ARCH[_architecture(config).upper()]
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    turned = {"q_proj.weight": config["num_attention_heads"], "k_proj.weight": config["num_key_value_heads"]}
    for name, tensor in _joined(load_file(folder / "model.safetensors")):
        place = names.get_name(name, try_suffixes=(".weight", ".bias"))
        heads = turned.get(".".join(name.split(".")[-2:]))
        if heads and arch == gguf.MODEL_ARCH.LLAMA:  # rotated by neighbours there, by halves here
            tensor = tensor.reshape(heads, 2, -1, tensor.shape[-1]).transpose(1, 2).reshape(tensor.shape)
        if tensor.dim() == 1 or name.endswith("mlp.gate.weight"):  # norms, biases, and what chooses experts
            from_one = arch == gguf.MODEL_ARCH.GEMMA3  # whose norms multiply by 1 + weight
            writer.add_tensor(place, (tensor.float() + from_one).numpy())
        elif weights == "f16":
            writer.add_tensor(place, tensor.half().numpy())
        else:
            kind = gguf.GGMLQuantizationType[weights.upper() if "embed_tokens" not in name else EMBEDDING[weights]]
            writer.add_tensor(place, gguf.quants.quantize(tensor.float().numpy(), kind), raw_dtype=kind)
