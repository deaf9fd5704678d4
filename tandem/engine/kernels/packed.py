"""Weights as the kernels read them, in panels of 32 outputs: see packing.h.

bfloat16 in 12 bits   survey ─> panels: the exponents that each counts from ──> pack ─> bytes, and rare numbers, listed
quantized             for each group of inputs scales and offsets, in the first of SCALE_TYPES that is exact, and codes
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from tandem.engine.kernels.structs import Rare, Weight
from tandem.engine.quantization import QuantizedWeight

SCALE_TYPES = (torch.bfloat16, torch.float16, torch.float32)
_OUTPUTS, _STEP_BYTES = 32, 96  # outputs of a panel; bytes of two of its inputs


class PackedWeight:
    """A `weight` (outputs, inputs), bfloat16 or quantized, packed for the kernels.

    `halves`: its outputs are (gate | up).

    `struct` points to the packed bytes.
    """

    def __init__(self, library: ctypes.CDLL, weight: Tensor | QuantizedWeight, halves: bool = False) -> None:
        if isinstance(weight, QuantizedWeight):
            kind = next((i for i, dtype in enumerate(SCALE_TYPES) if _holds(dtype, weight)), len(SCALE_TYPES) - 1)
            self._bytes = _panels(weight, halves, SCALE_TYPES[kind])
            self.struct = Weight(self._bytes.data_ptr(), None, None, *weight.shape, weight.bits, weight.group, kind)
            if weight.order is not None:
                self._order = weight.order.int()
                self.struct.order = self._order.data_ptr()
            return
        outputs, inputs = weight.shape
        panels = outputs // _OUTPUTS
        self._panels = torch.empty(panels + 1, 2, dtype=torch.int32)
        num_rare = library.tandem_survey(weight.data_ptr(), outputs, inputs, halves, self._panels.data_ptr())
        self._bytes = torch.empty(panels * (inputs // 2) * _STEP_BYTES, dtype=torch.uint8)
        self._rare = torch.empty(num_rare * ctypes.sizeof(Rare), dtype=torch.uint8)
        parts = (self._bytes, self._panels, self._rare)
        self.struct = Weight(*(part.data_ptr() for part in parts), outputs, inputs)
        library.tandem_pack(weight.data_ptr(), halves, ctypes.byref(self.struct))


def _holds(dtype: torch.dtype, weight: QuantizedWeight) -> bool:
    """True if `dtype` represents the weight's scales and offsets exactly."""
    return all(torch.equal(part.to(dtype).float(), part.float()) for part in (weight.scales, weight.offsets))


def _panels(weight: QuantizedWeight, halves: bool, scale_type: torch.dtype) -> Tensor:
    """Packs a quantized weight as bytes (panels, groups, bytes of a group)."""
    outputs, inputs = weight.shape
    order: slice | Tensor = slice(None)
    if halves:  # a panel has 16 outputs of each half
        order = torch.arange(outputs).view(2, -1, 16).transpose(0, 1).reshape(-1)
    groups = inputs // weight.group
    numbers = torch.stack((weight.scales[order], weight.offsets[order])).to(scale_type)  # (2, outputs, groups)
    head = numbers.view(2, -1, _OUTPUTS, groups).permute(1, 3, 0, 2).contiguous().view(-1, groups, 2 * _OUTPUTS)
    codes = weight.codes[order].view(-1, _OUTPUTS, groups, weight.group // 2, 2).permute(0, 2, 3, 1, 4).flatten(3)
    if weight.bits == 8:
        codes = codes ^ 128  # the codes minus 128, as signed bytes
    if weight.bits == 4:
        codes = codes[..., :_OUTPUTS] | codes[..., _OUTPUTS:] << 4
    return torch.cat((head.view(torch.uint8), codes.flatten(2)), dim=2)
