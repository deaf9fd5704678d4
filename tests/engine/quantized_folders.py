"""Quantized checkpoints in the formats of the hub, packed here from a plain model, and what they are opened."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# Of one layer: codes (outputs, inputs), zeros and scales (outputs, groups), the bits of a code and the group of each
# input, to tensors by their names' ends.
Pack = Callable[[Tensor, Tensor, Tensor, int, Tensor], dict[str, Tensor]]


def packed(numbers: Tensor, bits: int) -> Tensor:
    """Along the last dimension, the first lowest."""
    words = torch.zeros(*numbers.shape[:-1], numbers.shape[-1] * bits // 32, dtype=torch.int64)
    for place in range(32 // bits):
        words |= numbers[..., place :: 32 // bits].long() << bits * place
    return words.to(torch.int32)  # wraps


def awq_packed(numbers: Tensor) -> Tensor:
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    return packed(numbers.view(len(numbers), -1, 8)[..., order].flatten(1), 4)


def gptq(first_version: bool) -> Pack:
    def pack(codes: Tensor, zeros: Tensor, scales: Tensor, bits: int, groups: Tensor) -> dict[str, Tensor]:
        stored = (zeros.T - int(first_version)) % (1 << bits)
        return {
            "qweight": packed(codes, bits).T, "qzeros": packed(stored, bits), "scales": scales.T,
            "g_idx": groups.int(),
        }  # fmt: skip

    return pack


def awq(codes: Tensor, zeros: Tensor, scales: Tensor, bits: int, groups: Tensor) -> dict[str, Tensor]:
    return {"qweight": awq_packed(codes.T), "qzeros": awq_packed(zeros.T), "scales": scales.T}


def pack_quantized(codes: Tensor, zeros: Tensor, scales: Tensor, bits: int, groups: Tensor) -> dict[str, Tensor]:
    return {
        "weight_packed": packed(codes, bits), "weight_scale": scales, "weight_shape": torch.tensor(codes.shape),
        "weight_zero_point": packed(zeros.T, bits).T, "weight_g_idx": groups.int(),
    }  # fmt: skip


def int_quantized(codes: Tensor, zeros: Tensor, scales: Tensor, bits: int, groups: Tensor) -> dict[str, Tensor]:
    return {"weight": (codes - 128).to(torch.int8), "weight_scale": scales}


def bitsandbytes(codes: Tensor, zeros: Tensor, scales: Tensor, bits: int, groups: Tensor) -> dict[str, Tensor]:
    format_of = torch.tensor(0, dtype=torch.uint8)
    return {"weight": (codes - 128).to(torch.int8), "SCB": scales[:, 0].float() * 127, "weight_format": format_of}


def make_checkpoint(
    source: Path, folder: Path, pack: Pack, config: dict[str, Any], *, bits: int, group: int | None, symmetric: bool,
    ordered: bool = True,
) -> tuple[Path, Path]:  # fmt: skip
    """Folders of the quantized checkpoint and of the plain one with the same numbers. `group` None: whole outputs.

    Inputs are grouped as they lie, or, not `ordered`, as they come in some order: one for each number of inputs.
    """
    tensors, opened = dict[str, Tensor](), dict[str, Tensor]()
    for name, tensor in load_file(source / "model.safetensors").items():
        layer, _, kind = name.rpartition(".")
        if kind != "weight" or layer.rpartition(".")[2] not in LINEAR:
            tensors[name] = opened[name] = tensor
            continue
        inputs = tensor.shape[1]
        order = torch.arange(inputs)
        if not ordered:
            order = torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))
        codes, zeros, scales = _quantized(tensor[:, order], bits, group or inputs, symmetric)
        numbers = (codes.view(*scales.shape, -1) - zeros[..., None]) * scales.float()[..., None]
        back = order.argsort()
        opened[name] = numbers.flatten(1)[:, back].contiguous()
        made = pack(codes[:, back], zeros, scales, bits, back // (group or inputs))
        tensors |= {f"{layer}.{end}": found.contiguous() for end, found in made.items()}
    for path, held in ((folder / "quantized", tensors), (folder / "opened", opened)):
        shutil.copytree(source, path)
        save_file(held, path / "model.safetensors")
    said = json.loads((source / "config.json").read_text(encoding="utf-8"))
    (folder / "quantized" / "config.json").write_text(
        json.dumps(said | {"quantization_config": config}), encoding="utf-8"
    )
    return folder / "quantized", folder / "opened"


def _quantized(weight: Tensor, bits: int, group: int, symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    groups, top = weight.float().view(len(weight), -1, group), (1 << bits) - 1
    low, high = groups.amin(2), groups.amax(2)
    if symmetric:
        scales = torch.maximum(low.abs(), high.abs()) * 2 / top
        zeros = torch.full_like(low, 1 << bits - 1)
    else:
        scales = (high - low) / top
        zeros = (-low / scales).round().clamp(1, top)
    scales = scales.half()
    codes = (groups / scales.float()[..., None] + zeros[..., None]).round().clamp(0, top)
    return codes.flatten(1).int(), zeros.int(), scales
