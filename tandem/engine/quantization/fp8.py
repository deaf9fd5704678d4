"""Weights in 8-bit floats (e4m3), which GPUs multiply directly; on CPUs the loader converts them to the model's dtype.

A number is weight * scale, with a scale for each output; weights of a checkpoint with more scales are quantized again.
Rows of x are rounded to 8 bits too, each scaled by its greatest number (W8A8, dynamic).

checkpoints     quant_method fp8              weight, weight_scale_inv: a scale for each block of outputs and inputs
                compressed-tensors            weight, weight_scale: of each output, or one
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

MOST = 448.0  # the greatest number of e4m3
LEAST = 1e-20  # the lower bound of a row's greatest number, so that no scale is 0


@dataclass(frozen=True, slots=True, eq=False)
class Fp8Weight:
    """An fp8 weight: `numbers` (outputs, inputs) float8_e4m3fn, `scales` (outputs, 1) float32."""

    numbers: Tensor
    scales: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.numbers.shape[0], self.numbers.shape[1]

    def dense(self, dtype: torch.dtype) -> Tensor:
        return (self.numbers.float() * self.scales).to(dtype)

    def product(self, x: Tensor) -> Tensor:
        """Returns x (rows, inputs) weight^T (rows, outputs), computed to bfloat16 and converted to x's dtype."""
        rows = rounded(x)
        return torch._scaled_mm(
            rows.numbers, self.numbers.t(), scale_a=rows.scales, scale_b=self.scales.t(), out_dtype=torch.bfloat16
        ).to(x.dtype)


def rounded(numbers: Tensor) -> Fp8Weight:
    """Rounds rows (n, inputs) to fp8, each scaled by its greatest number."""
    wide = numbers.float()
    scales = wide.abs().amax(dim=1, keepdim=True).clamp(min=LEAST) / MOST
    return Fp8Weight((wide / scales).to(torch.float8_e4m3fn), scales)


def as_fp8(parts: Iterable[Fp8Weight | Tensor], device: torch.device) -> Fp8Weight:
    """Joins weights along their outputs to one fp8 weight on `device`."""
    rows = [part if isinstance(part, Fp8Weight) else rounded(part) for part in parts]
    numbers, scales = torch.cat([part.numbers for part in rows]), torch.cat([part.scales for part in rows])
    return Fp8Weight(numbers.to(device), scales.to(device))


@dataclass(frozen=True, slots=True)
class Fp8:
    """The format of an fp8 layer in a checkpoint: a scale for each block of `outputs` x `inputs`; -1: of all."""

    marker: str
    outputs: int
    inputs: int

    def needed(self, outputs: int, inputs: int) -> dict[str, tuple[int, ...]]:
        scales = (1,) if self.outputs == -1 else self._blocks(outputs, inputs)
        return {"weight": (outputs, inputs), self.marker: scales}

    def optional(self, outputs: int, inputs: int) -> dict[str, tuple[int, ...]]:
        return {}

    def read(self, found: Mapping[str, Tensor], outputs: int, inputs: int) -> Fp8Weight | Tensor:
        """Returns the layer's fp8 weight, or its dequantized numbers if an output has several scales."""
        weight, scales = found["weight"], found[self.marker].float()
        if weight.dtype != torch.float8_e4m3fn:
            raise ValueError(f"weight is of {weight.dtype}, not of float8_e4m3fn")
        if scales.numel() in (1, outputs):
            return Fp8Weight(weight, scales.view(-1, 1).expand(outputs, 1).contiguous())
        scales = scales.repeat_interleave(self.outputs, 0)[:outputs].repeat_interleave(self.inputs, 1)[:, :inputs]
        return weight.float() * scales

    def _blocks(self, outputs: int, inputs: int) -> tuple[int, int]:
        each = inputs if self.inputs == -1 else self.inputs
        return -(-outputs // self.outputs), -(-inputs // each)
