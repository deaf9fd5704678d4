"""Weights in 4-bit floats (e2m1), two in a byte; each 32 share a power of two as their scale.

Twice such a number is an integer between -12 and 12, so the engine's own form of 8 bits holds it exactly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.engine.quantization.quantization import QuantizedWeight

GROUP, ZERO = 32, 12
# Twice the number of each code; the code's fourth bit is the sign.
_TWICE = (0, 1, 2, 3, 4, 6, 8, 12)
_CODES = torch.tensor([ZERO + number for number in _TWICE] + [ZERO - number for number in _TWICE], dtype=torch.uint8)
_BIAS = 127 + 1  # the bias of stored exponents, plus 1 because the numbers are doubled


@dataclass(frozen=True, slots=True)
class Mxfp4:
    marker = "blocks"

    def needed(self, outputs: int, inputs: int) -> dict[str, tuple[int, ...]]:
        if inputs % GROUP:
            raise ValueError(f"quantization_config: mxfp4 packs inputs by {GROUP}, got {inputs}")
        return {"blocks": (outputs, inputs // GROUP, GROUP // 2), "scales": (outputs, inputs // GROUP)}

    def optional(self, outputs: int, inputs: int) -> dict[str, tuple[int, ...]]:
        return {}

    def read(self, found: Mapping[str, Tensor], outputs: int, inputs: int) -> QuantizedWeight:
        for name, tensor in found.items():
            if tensor.dtype != torch.uint8:
                raise ValueError(f"{name} is of {tensor.dtype}, not of uint8")
        bytes_ = found["blocks"].view(outputs, -1)
        codes = torch.stack((bytes_ & 15, bytes_ >> 4), dim=-1).view(outputs, inputs)
        scales = torch.exp2(found["scales"].float() - _BIAS)
        return QuantizedWeight(_CODES[codes.int()], scales, scales * -ZERO, 8)
