"""Linear layers and norms: what every part of a decoder is made of.

Some are one product of several of a checkpoint's layers: q, k and v; gate and up. `parts` are those, by name.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.engine.float32 import float32_kernels
from tandem.engine.quantization import Fp8Weight, QuantizedWeight

# What the float32 kernels do not compute goes to a BLAS, which sums in another order for fewer rows, and for what is
# left over of a multiple where threads share the rows. MKL's strict mode knows one order; it is read at the first
# product. Others are given rows in fours.
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
ROWS_ALIKE = 4
# Without the instructions for it torch multiplies bfloat16 number by number: a product of so many rows or more is
# faster where rows and weights, large as they may be, are made float32 first.
ROWS_WIDENED = 32
_SLOW_BFLOAT16 = torch._C._has_mkldnn and not torch.ops.mkldnn._is_mkldnn_bf16_supported()


class Adapt(Protocol):
    """A function that adds to the outputs of linear layers."""

    def __call__(self, layer: int, name: str, x: Tensor, out: Tensor) -> None:
        """To `out`, what the linear layer `name` (qkv, o, gate_up or down) made of `x`."""


def unadapted(layer: int, name: str, x: Tensor, out: Tensor) -> None:
    pass


class Linear:
    """`parts`: outputs of each layer of a checkpoint, by its name; they lie one after the other."""

    def __init__(self, inputs: int, parts: Mapping[str, int], bias: bool, place: Tensor) -> None:
        self.parts, outputs = dict(parts), sum(parts.values())
        self.weight: Tensor | QuantizedWeight | Fp8Weight = place.new_empty(outputs, inputs)
        self.bias = place.new_empty(outputs) if bias else None

    def __call__(self, x: Tensor) -> Tensor:
        if isinstance(self.weight, Fp8Weight):
            product = self.weight.product(x)
            return product if self.bias is None else product + self.bias
        return linear(x, dense(self.weight, x.dtype), self.bias)

    def checkpoint_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors of a checkpoint, each as the part of this layer's that it fills."""
        for kind, tensor in (("weight", self.weight), ("bias", self.bias)):
            if isinstance(tensor, Tensor):
                for name, part in zip(self.parts, torch.split(tensor, list(self.parts.values())), strict=True):
                    yield f"{name}.{kind}", part


def is_exact(x: Tensor) -> bool:
    """True where a row of `x` is to come to the same numbers, bit for bit, whatever rows lie beside it."""
    return x.dtype is torch.float32 and x.is_cpu


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """As torch's; where that is exact, each row's sums go the same way."""
    if _SLOW_BFLOAT16 and len(x) >= ROWS_WIDENED and x.is_cpu and x.dtype is torch.bfloat16:
        return F.linear(x.float(), weight.float(), None if bias is None else bias.float()).bfloat16()
    return _exact_linear(x, weight, bias) if is_exact(x) else F.linear(x, weight, bias)


def _exact_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    # The weights of adapters lie turned.
    if weight.stride(1) == 1 and (kernels := float32_kernels()) is not None:
        return kernels.linear(x, weight, bias)
    if missing := -len(x) % ROWS_ALIKE:
        return F.linear(F.pad(x, (0, 0, 0, missing)), weight, bias)[: len(x)]
    return F.linear(x, weight, bias)


def dense(weight: Tensor | QuantizedWeight, dtype: torch.dtype) -> Tensor:
    return weight if isinstance(weight, Tensor) else weight.dense(dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)


def rms_norm_from_one(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """By weights that say how far they are from 1."""
    return F.rms_norm(x.float(), weight.shape, weight.float() + 1, eps).to(x.dtype)
