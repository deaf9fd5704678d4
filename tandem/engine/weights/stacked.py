"""Checkpoints in which one tensor holds a layer's weights of all experts, shown as if each expert had its own.

….mlp.experts.gate_up_proj          (experts, inputs, outputs)            ──> ….mlp.experts.3.gate_up_proj.weight
….mlp.experts.gate_up_proj_bias     (experts, outputs)                    ──> ….mlp.experts.3.gate_up_proj.bias
….mlp.experts.gate_up_proj_blocks   (experts, outputs, inputs / 32, 16)   ──> ….mlp.experts.3.gate_up_proj.blocks
….mlp.experts.gate_up_proj_scales   (experts, outputs, inputs / 32)       ──> ….mlp.experts.3.gate_up_proj.scales
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, NamedTuple, Self

from torch import Tensor

_STACKED = re.compile(r"(.+\.experts)\.(gate_up_proj|down_proj)(?:_(bias|blocks|scales))?")


class _Place(NamedTuple):
    tensor: str
    expert: int
    is_turned: bool  # the tensor's inputs come before its outputs


class _ExpertsSlice(NamedTuple):
    shape: list[int]

    def get_shape(self) -> list[int]:
        return self.shape


class Unstacked:
    """A safetensors file `file` with a tensor for each expert; it has the methods of such a file that callers use."""

    def __init__(self, file: Any) -> None:
        self._file, self._places = file, dict[str, _Place]()
        for name in file.keys():  # noqa: SIM118
            if (found := _STACKED.fullmatch(name)) is not None:
                at, part, kind = found.groups()
                for expert in range(file.get_slice(name).get_shape()[0]):
                    place = _Place(name, expert, is_turned=kind is None)
                    self._places[f"{at}.{expert}.{part}.{kind or 'weight'}"] = place

    def __enter__(self) -> Self:
        self._file.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._file.__exit__(*error)

    def keys(self) -> Iterable[str]:
        whole = (name for name in self._file.keys() if not _STACKED.fullmatch(name))  # noqa: SIM118
        return [*whole, *self._places]

    def get_slice(self, name: str) -> Any:
        place = self._places.get(name)
        if place is None:
            return self._file.get_slice(name)
        shape = self._file.get_slice(place.tensor).get_shape()[1:]
        return _ExpertsSlice(shape[::-1] if place.is_turned else shape)

    def get_tensor(self, name: str) -> Tensor:
        place = self._places.get(name)
        if place is None:
            tensor: Tensor = self._file.get_tensor(name)
            return tensor
        part: Tensor = self._file.get_slice(place.tensor)[place.expert]
        return part.T if place.is_turned else part
