"""Weights in 8 or 4 bits a number, quantized when a model is loaded; activations are not quantized (W8A16, W4A16).

int8   one scale for each output
int4   a scale and an offset for each 128 inputs of an output, from the range that leaves the least squared error; the
       head, which every token needs whole, is int8

A number is code * scale + offset.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

GROUP = 128
_SHARES = (1.0, 0.9, 0.8)  # the shares of a group's range that are tried as the range of codes


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedWeight:
    """A quantized weight: `codes` (outputs, inputs) uint8 below 2 ** `bits`; `scales`, `offsets` (outputs, groups).

    Scales and offsets are bfloat16 if the engine quantized the weight, float32 if the checkpoint was quantized. With an
    `order` (inputs,), column i of the codes is input order[i], so that inputs that share a scale lie side by side.
    """

    codes: Tensor
    scales: Tensor
    offsets: Tensor
    bits: int
    order: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def group(self) -> int:
        """The number of inputs that share a scale."""
        return self.codes.shape[1] // self.scales.shape[1]

    def dense(self, dtype: torch.dtype) -> Tensor:
        return self.rows(slice(None), dtype)

    def rows(self, which: Tensor | slice, dtype: torch.dtype) -> Tensor:
        scales, offsets = self.scales[which].float()[..., None], self.offsets[which].float()[..., None]
        codes = self.codes[which].view(*scales.shape[:-1], self.group)
        numbers = (codes * scales + offsets).flatten(-2).to(dtype)
        return numbers if self.order is None else numbers[..., self.order.argsort()]


def quantize(weight: Tensor, method: str) -> QuantizedWeight:
    """Quantizes `weight` (outputs, inputs) by the `method` int8 or int4."""
    if method == "int8":
        scales = (weight.float().abs().amax(dim=1, keepdim=True) / 127).bfloat16()
        offsets = -128 * scales
        return QuantizedWeight(_codes(weight, scales, offsets, 8), scales, offsets, 8)
    group = math.gcd(weight.shape[1], GROUP)
    groups = weight.float().view(len(weight), weight.shape[1] // group, group)
    low, high = groups.amin(dim=2), groups.amax(dim=2)
    best = torch.full_like(low, math.inf)
    scales, offsets = torch.empty_like(low, dtype=torch.bfloat16), torch.empty_like(low, dtype=torch.bfloat16)
    for share in _SHARES:
        scale, offset = ((high - low) * share / 15).bfloat16(), (low * share).bfloat16()
        tried = QuantizedWeight(_codes(weight, scale, offset, 4), scale, offset, 4).dense(torch.float32)
        error = (tried.view_as(groups) - groups).square().sum(dim=2)
        better = error < best
        best = torch.where(better, error, best)
        scales, offsets = torch.where(better, scale, scales), torch.where(better, offset, offsets)
    return QuantizedWeight(_codes(weight, scales, offsets, 4), scales, offsets, 4)


def _codes(weight: Tensor, scales: Tensor, offsets: Tensor, bits: int) -> Tensor:
    found = weight.to(torch.float32, copy=True).view(*scales.shape, weight.shape[1] // scales.shape[1])
    inverse = scales.float().reciprocal().nan_to_num(posinf=0.0)
    found.sub_(offsets.float()[..., None]).mul_(inverse[..., None])
    return found.round_().clamp_(0, 2**bits - 1).to(torch.uint8).view(weight.shape)
