"""A weight in 12 bits a number, without loss: see packing.h.

survey ─> panels: the exponents that each counts from ──> pack ─> bytes, and the rare numbers that are listed
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from tandem.engine.kernels.structs import Rare, Weight

_OUTPUTS, _STEP_BYTES = 32, 96  # of a panel; of two inputs of it


class PackedWeight:
    """`weight` (outputs, inputs) bfloat16, packed. `halves`: the outputs are (gate | up).

    `struct` points at it.
    """

    def __init__(self, library: ctypes.CDLL, weight: Tensor, halves: bool = False) -> None:
        outputs, inputs = weight.shape
        panels = outputs // _OUTPUTS
        self._panels = torch.empty(panels + 1, 2, dtype=torch.int32)
        num_rare = library.tandem_survey(weight.data_ptr(), outputs, inputs, halves, self._panels.data_ptr())
        self._bytes = torch.empty(panels * (inputs // 2) * _STEP_BYTES, dtype=torch.uint8)
        self._rare = torch.empty(num_rare * ctypes.sizeof(Rare), dtype=torch.uint8)
        parts = (self._bytes, self._panels, self._rare)
        self.struct = Weight(*(part.data_ptr() for part in parts), outputs, inputs)
        library.tandem_pack(weight.data_ptr(), halves, ctypes.byref(self.struct))
