"""Reading a PEFT folder into an Adapter. Errors name the field or tensor that cannot be served.

adapter_config.json          the layers trained, the base model, the scale: lora_alpha / r, or / sqrt(r) with rslora
adapter_model.safetensors    base_model.model.model.layers.3.self_attn.q_proj.lora_A.weight (r, inputs) and
                             lora_B.weight (outputs, r)
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import structlog
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tandem.engine.lora.adapter import PARTS, Adapter, LowRank
from tandem.engine.models import ModelConfig, is_exact

log = structlog.get_logger(__name__)
MAX_RANK = 256
WEIGHTS = "adapter_model.safetensors"
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_NAME = re.compile(r"(?:base_model\.model\.)?(model\.layers\.(\d+)\.(?:self_attn|mlp)\.(\w+))\.lora_([AB])\.weight")
# The only layers that adapters may change in models with experts.
_OF_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
# Checkpoints' names of layers that are fused as in `Decoder`, and the names there.
_FUSED: Mapping[str, str] = {"qkv_proj": "qkv", "gate_up_proj": "gate_up"}
# Fields that change what an adapter computes, with the values that leave the field unused.
_PLAIN: Mapping[str, tuple[Any, ...]] = {
    "bias": (None, "none"), "fan_in_fan_out": (None, False), "use_dora": (None, False), "lora_bias": (None, False),
    "modules_to_save": (None, []), "trainable_token_indices": (None, []), "target_parameters": (None, []),
    "alora_invocation_tokens": (None, []), "use_qalora": (None, False), "layer_replication": (None, []),
    "megatron_config": (None,), "arrow_config": (None,),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Base:
    """The model that adapters are for, and the `names` by which it is known.

    An adapter made for another name is served if its shapes fit, because models get renamed; the log warns of it.
    """

    config: ModelConfig
    names: frozenset[str]


def shapes_of(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Returns (outputs, inputs) of each linear layer, by its name in a checkpoint."""
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    hidden, inner = config.hidden_size, config.intermediate_size
    return {
        "q_proj": (q, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden), "o_proj": (hidden, q),
        "gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner),
    }  # fmt: skip


def checkpoint_shapes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Returns (outputs, inputs) of each adaptable layer as the model's own checkpoint has it: perhaps fused."""
    shapes = shapes_of(config)
    for name, fused in _FUSED.items():
        if config.fused_qkv if fused == "qkv" else config.fused_gate_up:
            parts = [shapes.pop(part) for part in PARTS[fused]]
            shapes[name] = sum(outputs for outputs, _ in parts), parts[0][1]
    if config.latent is not None:
        return {}
    return {name: shape for name, shape in shapes.items() if config.experts is None or name in _OF_ATTENTION}


def part_sizes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Returns the number of outputs of each part of the fused linear layers."""
    shapes = shapes_of(config)
    return {name: tuple(shapes[part][0] for part in parts) for name, parts in PARTS.items()}


def fingerprint(folder: Path) -> str:
    """Returns the revision of the adapter in `folder`: a hash of its files.

    Raises:
        ValueError: a file cannot be read.
    """
    digest = blake2b(digest_size=16)
    for name in ("adapter_config.json", WEIGHTS):
        try:
            content = (folder / name).read_bytes()
        except OSError as error:
            raise ValueError(f"{folder / name}: {error.strerror}") from None
        digest.update(len(content).to_bytes(8, "little") + content)
    return digest.hexdigest()


def read_adapter(folder: Path, base: Base, place: Tensor) -> Adapter:
    """Reads the adapter in `folder`, with weights of the dtype and on the device of `place`.

    Raises ValueError naming the field or tensor that is wrong.
    """
    revision = fingerprint(folder)
    try:
        said = json.loads((folder / "adapter_config.json").read_bytes())
    except ValueError as error:
        raise ValueError(f"{folder / 'adapter_config.json'}: {error}") from None
    if not isinstance(said, dict):
        raise ValueError(f"{folder / 'adapter_config.json'}: not a JSON object")
    _check_config(said, base)
    pairs = _pairs(_tensors(folder / WEIGHTS), base.config)
    layers: list[dict[str, LowRank]] = [{} for _ in range(base.config.num_layers)]
    for (layer, name), (module, down, up) in pairs.items():
        scaled, placed = up.to(torch.float32).T * _scale(said, module, len(down)), _placed(down, place)
        parts, sizes = PARTS.get(_FUSED.get(name, ""), (name,)), part_sizes(base.config).get(_FUSED.get(name, ""))
        for part, outputs in zip(parts, torch.split(scaled, list(sizes or (len(up),)), dim=1), strict=True):
            layers[layer][part] = LowRank(placed, _up_placed(outputs, place))
    return Adapter(revision, layers)


def _check_config(said: Mapping[str, Any], base: Base) -> None:
    if said.get("peft_type") != "LORA":
        raise ValueError(f"peft_type: {said.get('peft_type')!r} is not LORA")
    for field, plain in _PLAIN.items():
        if said.get(field) not in plain:
            raise ValueError(f"{field}: {said[field]!r} is not supported")
    rank = said.get("r")
    if not isinstance(rank, int) or not 1 <= rank <= MAX_RANK:
        raise ValueError(f"r: {rank!r} is not a rank between 1 and {MAX_RANK}")
    if not isinstance(said.get("lora_alpha"), int | float):
        raise ValueError(f"lora_alpha: {said.get('lora_alpha')!r} is not a number")
    _check_patterns(said.get("alpha_pattern") or {})
    made_for = str(said.get("base_model_name_or_path") or "").rstrip("/").rpartition("/")[2]
    if made_for and made_for.lower() not in base.names:
        log.warning("adapter made for a model of another name", made_for=made_for, model=sorted(base.names))


def _check_patterns(alphas: Any) -> None:
    if not isinstance(alphas, dict) or not all(isinstance(alpha, int | float) for alpha in alphas.values()):
        raise ValueError("alpha_pattern: must be numbers by patterns of names")
    for pattern in alphas:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"alpha_pattern: {pattern!r} is no pattern: {error}") from None


def _tensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    try:
        with safe_open(path, framework="pt") as file:
            for name in sorted(file.keys()):
                yield name, file.get_tensor(name)
    except SafetensorError as error:
        raise ValueError(f"{path}: {error}") from None


Pairs = dict[tuple[int, str], tuple[str, Tensor, Tensor]]


def _pairs(tensors: Iterator[tuple[str, Tensor]], config: ModelConfig) -> Pairs:
    """Returns, by layer number and name, each linear layer's module name, A and B.

    Raises ValueError if one is wrong.
    """
    found: dict[tuple[int, str], dict[str, Tensor]] = {}
    modules, shapes = dict[tuple[int, str], str](), checkpoint_shapes(config)
    for name, tensor in tensors:
        match = _NAME.fullmatch(name)
        if match is None or match[3] not in shapes or int(match[2]) >= config.num_layers:
            raise ValueError(f"tensor {name} belongs to no linear layer of the model")
        if tensor.dtype not in _DTYPES:
            raise ValueError(f"tensor {name} is of {str(tensor.dtype)[6:]}, not of float32, float16 or bfloat16")
        if not tensor.isfinite().all():
            raise ValueError(f"tensor {name} has numbers that are not finite")
        key = int(match[2]), match[3]
        modules[key] = match[1]
        found.setdefault(key, {})[match[4]] = tensor
    if not found:
        raise ValueError(f"{WEIGHTS} has no tensors")
    return {key: (modules[key], *_checked(modules[key], both, shapes[key[1]])) for key, both in found.items()}


def _checked(module: str, both: Mapping[str, Tensor], shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
    if both.keys() != {"A", "B"}:
        raise ValueError(f"{module} has lora_{'A' if 'A' in both else 'B'} without the other")
    a, b = both["A"], both["B"]
    rank, (outputs, inputs) = len(a), shape
    if a.shape != (rank, inputs) or b.shape != (outputs, rank):
        wanted = f"(r, {inputs}) and ({outputs}, r)"
        raise ValueError(f"{module}: A and B have shapes {tuple(a.shape)} and {tuple(b.shape)}, the model has {wanted}")
    if not 1 <= rank <= MAX_RANK:
        raise ValueError(f"{module}: rank {rank} is not between 1 and {MAX_RANK}")
    return a, b


def _scale(said: Mapping[str, Any], module: str, rank: int) -> float:
    alpha = float(said["lora_alpha"])
    for pattern, other in (said.get("alpha_pattern") or {}).items():
        if re.fullmatch(rf"(.*\.)?({pattern})", module):
            alpha = float(other)
            break
    return alpha / (math.sqrt(rank) if said.get("use_rslora") else rank)


def _up_placed(up: Tensor, place: Tensor) -> Tensor:
    """Places (rank, outputs) such that the float32 kernels, which read outputs one after the other, can multiply it."""
    return _placed(up.T, place).T if is_exact(place) else _placed(up, place)


def _placed(tensor: Tensor, place: Tensor) -> Tensor:
    return tensor.to(device=place.device, dtype=place.dtype).contiguous()
