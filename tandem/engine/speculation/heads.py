"""Reading published heads that were trained for a model. The names of their tensors determine the kind of head.

medusa   medusa_lm_head.safetensors or .pt: `{head}.{block}.linear.weight` and .bias, then `{head}.{blocks}.weight`; or
         model.safetensors: `blocks.{head}.layers.{block}.weight`, `lm_heads.{head}.weight`
eagle    model.safetensors or pytorch_model.bin: `fc` (hidden, 2 hidden), `layers.0`
eagle3   the same: `fc` (hidden, 3 hidden), `midlayer` or `layers.0`, `norm`, `lm_head` and `d2t`

An eagle head without its own `embed_tokens` or `lm_head` uses the model's; the last norm is the model's.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt", "model.safetensors", "pytorch_model.bin")
_MEDUSA = (
    (re.compile(r"(?:medusa_heads\.)?blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)"), r"\1.\2.linear.\3"),
    (re.compile(r"(?:medusa_heads\.)?lm_heads\.(\d+)\.weight"), r"\1.head"),
    (re.compile(r"(\d+)\.\d+\.weight"), r"\1.head"),
)
_FIRST = re.compile(r"0\.0\.linear\.weight|(medusa_heads\.)?blocks\.0\.layers\.0\.weight")


class HeadFile(NamedTuple):
    """A head's tensors. `method` is medusa, eagle or eagle3. Tensors of medusa are `{head}.{block}.linear.…` and
    `{head}.head`; those of eagle heads have their published names, except that the layer is called `layer`."""

    folder: Path
    method: str
    tensors: Mapping[str, Tensor]

    def take(self, name: str, *shape: int) -> Tensor:
        """Returns the tensor `name`. Raises ValueError if it is missing or has another shape."""
        found = self.tensors.get(name)
        if found is None:
            raise ValueError(f"speculative_model: {self.folder}: tensor {name} is missing")
        if found.shape != shape:
            shapes = f"has shape {list(found.shape)}, the model needs {list(shape)}"
            raise ValueError(f"speculative_model: {self.folder}: tensor {name} {shapes}")
        return found


def read_head(folder: Path) -> HeadFile | None:
    """Reads the head in `folder`; None if the folder holds no head. Raises ValueError naming the wrong file."""
    for name in FILES:
        file = folder / name
        if file.is_file():
            return _read_medusa(folder, file) if name.startswith("medusa") else _read(folder, file)
    return None


def _read(folder: Path, file: Path) -> HeadFile | None:
    names = _names(file)
    if any(map(_FIRST.fullmatch, names)):
        return _read_medusa(folder, file)
    if "fc.weight" not in names:
        return None
    tensors = {re.sub(r"^(midlayer|layers\.0)\.", "layer.", name): tensor for name, tensor in _load(file).items()}
    if further := [name for name in tensors if re.match(r"layers\.[1-9]", name)]:
        raise ValueError(f"speculative_model: {file}: {further[0]}: heads of one layer are supported")
    return HeadFile(folder, "eagle3" if "layer.hidden_norm.weight" in tensors else "eagle", tensors)


def _read_medusa(folder: Path, file: Path) -> HeadFile:
    tensors = {}
    for name, tensor in _load(file).items():
        for pattern, new in _MEDUSA:
            name = pattern.sub(new, name) if pattern.fullmatch(name) else name
        tensors[name] = tensor
    return HeadFile(folder, "medusa", tensors)


def _names(file: Path) -> Collection[str]:
    if file.suffix != ".safetensors":
        return _load(file)
    try:
        with safe_open(file, framework="pt") as opened:
            return set(opened.keys())
    except SafetensorError as error:
        raise ValueError(f"speculative_model: {file}: {error}") from None


def _load(file: Path) -> dict[str, Tensor]:
    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        found = torch.load(file, map_location="cpu", weights_only=True)
    except (SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise ValueError(f"speculative_model: {file}: {str(error).splitlines()[0]}") from None
    if not isinstance(found, dict) or not all(isinstance(tensor, Tensor) for tensor in found.values()):
        raise ValueError(f"speculative_model: {file}: not a dictionary of tensors")
    return found
