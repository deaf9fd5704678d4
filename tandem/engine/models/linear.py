"""Linear layers and norms, the building blocks of a decoder.

A linear layer may fuse several layers of a checkpoint into one product: q, k and v; gate and up. `parts` names them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.engine.float32 import float32_kernels
from tandem.engine.models.config import ModelConfig
from tandem.engine.quantization import Fp8Weight, QuantizedWeight

# Products that the float32 kernels cannot compute go to a BLAS, which may sum in another order for few rows, and for
# leftover rows where threads share the rows. MKL's strict mode has one order; MKL reads the variable at its first
# product. For any other BLAS, rows are padded to a multiple of four.
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
ROWS_ALIKE = 4
# On CPUs without bfloat16 instructions torch multiplies bfloat16 number by number: a product of this many rows or more
# is faster if rows and weights, however large, are converted to float32 first.
ROWS_WIDENED = 32
_SLOW_BFLOAT16 = torch._C._has_mkldnn and not torch.ops.mkldnn._is_mkldnn_bf16_supported()


class Adapt(Protocol):
    """A function that adds to the outputs of linear layers."""

    def __call__(self, layer: int, name: str, x: Tensor, out: Tensor) -> None:
        """Adds to `out`, the output of the linear layer `name` (qkv, o, gate_up or down) for the input `x`."""


def unadapted(layer: int, name: str, x: Tensor, out: Tensor) -> None:
    pass


class Norm(Protocol):
    """A function that normalizes rows."""

    def __call__(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Returns x normalized and multiplied by `weight`."""


class Linear:
    """A linear layer. `parts`: the number of outputs of each layer of a checkpoint that it fuses, in order, by name."""

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
        """Yields each checkpoint tensor's name and the part of this layer's weight or bias that it fills."""
        for kind, tensor in (("weight", self.weight), ("bias", self.bias)):
            if isinstance(tensor, Tensor):
                for name, part in zip(self.parts, torch.split(tensor, list(self.parts.values())), strict=True):
                    yield f"{name}.{kind}", part


def is_exact(x: Tensor) -> bool:
    """True if a row of `x` must give the same numbers, bit for bit, whatever other rows `x` has."""
    return x.dtype is torch.float32 and x.is_cpu


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Computes what torch's linear does; if `x` is exact (is_exact), a row's result does not depend on other rows."""
    if _SLOW_BFLOAT16 and len(x) >= ROWS_WIDENED and x.is_cpu and x.dtype is torch.bfloat16:
        return F.linear(x.float(), weight.float(), None if bias is None else bias.float()).bfloat16()
    return _exact_linear(x, weight, bias) if is_exact(x) else F.linear(x, weight, bias)


def _exact_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    # Weights of adapters are transposed views, which the kernels cannot read.
    if weight.stride(1) == 1 and (kernels := float32_kernels()) is not None:
        return kernels.linear(x, weight, bias)
    if missing := -len(x) % ROWS_ALIKE:
        return F.linear(F.pad(x, (0, 0, 0, missing)), weight, bias)[: len(x)]
    return F.linear(x, weight, bias)


def dense(weight: Tensor | QuantizedWeight, dtype: torch.dtype) -> Tensor:
    return weight if isinstance(weight, Tensor) else weight.dense(dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)


def layer_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.layer_norm(x.float(), weight.shape, weight.float(), None, eps).to(x.dtype)


def rms_norm_from_one(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalizes x and multiplies it by 1 + `weight`."""
    return F.rms_norm(x.float(), weight.shape, weight.float() + 1, eps).to(x.dtype)


def norm_of(config: ModelConfig) -> Norm:
    """Returns the family's norm."""
    return rms_norm_from_one if config.norms_from_one else layer_norm if config.norms_centered else rms_norm
