"""The formats of quantized linear layers in checkpoints of the hub; errors name any other format.

quant_method                        tensors of a layer
gptq           4, 8 bits            qweight (inputs / n, outputs), qzeros (groups, outputs / n), scales, g_idx
awq            4 bits, gemm         qweight (inputs, outputs / 8), qzeros (groups, outputs / 8), scales; in its order
compressed-    pack-quantized       weight_packed (outputs, inputs / n), weight_scale, weight_shape, weight_zero_point
tensors        int-quantized        weight int8, weight_scale
bitsandbytes   8 bits               weight int8, SCB
fp8, and compressed-tensors' float-quantized: see fp8.py; mxfp4: see mxfp4.py

n numbers of 4 or 8 bits are packed in an int32, the first one lowest. A number is (code - zero) * scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Protocol

import torch
from pydantic import Field, TypeAdapter, ValidationError
from torch import Tensor

from tandem.checkpoints import ModelFile
from tandem.engine.quantization.fp8 import Fp8, Fp8Weight
from tandem.engine.quantization.mxfp4 import Mxfp4
from tandem.engine.quantization.quantization import QuantizedWeight

Shapes = dict[str, tuple[int, ...]]
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the output in each of eight places, the lowest bits first


class CheckpointFormat(Protocol):
    """The format of one quantized linear layer in a checkpoint."""

    @property
    def marker(self) -> str:
        """The name of the tensor that only a quantized layer has."""

    def needed(self, outputs: int, inputs: int) -> Shapes:
        """Returns the shapes of a layer's tensors, by suffix of its name. Raises ValueError if the sizes do not fit."""

    def optional(self, outputs: int, inputs: int) -> Shapes:
        """Returns the shapes of the layer's optional tensors, by suffix of its name."""

    def read(self, found: Mapping[str, Tensor], outputs: int, inputs: int) -> QuantizedWeight | Fp8Weight | Tensor:
        """Converts the layer's tensors to the engine's form; a plain Tensor result is the dequantized weight."""


@dataclass(frozen=True, slots=True)
class Gptq:
    """GPTQ. `zero_offset` is added to stored zeros: 1 in the first version of the format."""

    bits: int
    group_size: int
    zero_offset: int
    marker = "qweight"

    def needed(self, outputs: int, inputs: int) -> Shapes:
        group, each = _group(self.group_size, inputs), 32 // self.bits
        _divides("inputs", inputs, each)
        _divides("outputs", outputs, each)
        groups = inputs // group
        return {"qweight": (inputs // each, outputs), "qzeros": (groups, outputs // each), "scales": (groups, outputs)}

    def optional(self, outputs: int, inputs: int) -> Shapes:
        return {"g_idx": (inputs,)}

    def read(self, found: Mapping[str, Tensor], outputs: int, inputs: int) -> QuantizedWeight:
        order = _order(found, "g_idx", _group(self.group_size, inputs))
        zeros = (_unpacked(found["qzeros"], self.bits) + self.zero_offset) % (1 << self.bits)
        codes = _unpacked(found["qweight"].T, self.bits)
        return _weight(codes, found["scales"].T, zeros.T, self.bits, order)


@dataclass(frozen=True, slots=True)
class Awq:
    group_size: int
    marker = "qweight"

    def needed(self, outputs: int, inputs: int) -> Shapes:
        groups = inputs // _group(self.group_size, inputs)
        _divides("outputs", outputs, 8)
        return {"qweight": (inputs, outputs // 8), "qzeros": (groups, outputs // 8), "scales": (groups, outputs)}

    def optional(self, outputs: int, inputs: int) -> Shapes:
        return {}

    def read(self, found: Mapping[str, Tensor], outputs: int, inputs: int) -> QuantizedWeight:
        codes, zeros = (self._unpacked(found[name]).T for name in ("qweight", "qzeros"))
        return _weight(codes, found["scales"].T, zeros, 4)

    def _unpacked(self, packed: Tensor) -> Tensor:
        places = torch.tensor(_AWQ_ORDER).argsort()
        return _unpacked(packed, 4).view(len(packed), -1, 8)[..., places].flatten(1)


@dataclass(frozen=True, slots=True)
class PackQuantized:
    bits: int
    group_size: int
    symmetric: bool
    marker = "weight_packed"

    def needed(self, outputs: int, inputs: int) -> Shapes:
        groups, each = inputs // _group(self.group_size, inputs), 32 // self.bits
        shapes: Shapes = {"weight_packed": (outputs, -(-inputs // each)), "weight_scale": (outputs, groups)}
        return shapes if self.symmetric else shapes | {"weight_zero_point": (-(-outputs // each), groups)}

    def optional(self, outputs: int, inputs: int) -> Shapes:
        return {"weight_shape": (2,), "weight_g_idx": (inputs,)}

    def read(self, found: Mapping[str, Tensor], outputs: int, inputs: int) -> QuantizedWeight:
        codes, zeros = _unpacked(found["weight_packed"], self.bits)[:, :inputs], torch.tensor(1 << self.bits - 1)
        if not self.symmetric:
            zeros = _unpacked(found["weight_zero_point"].T, self.bits).T[:outputs]
        order = _order(found, "weight_g_idx", _group(self.group_size, inputs))
        return _weight(codes, found["weight_scale"], zeros, self.bits, order)


@dataclass(frozen=True, slots=True)
class Int8:
    """Signed bytes with a scale for each output or group: the numbers of the tensor `scale` divided by `full`."""

    scale: str
    full: int
    group_size: int = -1
    flat: bool = False  # `scale` has one dimension

    @property
    def marker(self) -> str:
        return self.scale

    def needed(self, outputs: int, inputs: int) -> Shapes:
        groups = inputs // _group(self.group_size, inputs)
        return {"weight": (outputs, inputs), self.scale: (outputs,) if self.flat else (outputs, groups)}

    def optional(self, outputs: int, inputs: int) -> Shapes:
        return {"weight_format": ()}

    def read(self, found: Mapping[str, Tensor], outputs: int, inputs: int) -> QuantizedWeight:
        if found["weight"].dtype != torch.int8:
            raise ValueError(f"weight is of {found['weight'].dtype}, not of int8")
        scales = found[self.scale].float().view(outputs, -1) / self.full
        return _weight(found["weight"].to(torch.int16) + 128, scales, torch.tensor(128), 8)


class _Gptq(ModelFile):
    quant_method: Literal["gptq"]
    bits: Literal[4, 8]
    group_size: int
    checkpoint_format: Literal["gptq", "gptq_v2"] = "gptq"
    dynamic: None = None


class _Awq(ModelFile):
    quant_method: Literal["awq"]
    bits: Literal[4]
    group_size: int
    version: Literal["gemm", "GEMM"] = "gemm"
    zero_point: Literal[True] = True


class _Bitsandbytes(ModelFile):
    quant_method: Literal["bitsandbytes"]
    load_in_8bit: Literal[True]


class _Fp8(ModelFile):
    quant_method: Literal["fp8"]
    fmt: Literal["e4m3"] = "e4m3"
    activation_scheme: Literal["dynamic"] = "dynamic"
    weight_block_size: tuple[Annotated[int, Field(ge=1)], Annotated[int, Field(ge=1)]] = Field(strict=False)


class _Mxfp4(ModelFile):
    quant_method: Literal["mxfp4"]


class _Weights(ModelFile):
    num_bits: Literal[4, 8]
    type: Literal["int", "float"]
    strategy: Literal["tensor", "channel", "group"]
    symmetric: bool = True
    group_size: int | None = None
    actorder: Literal["group", "weight", "static"] | None = None  # "group" comes with a tensor weight_g_idx


class _Activations(ModelFile):
    """Activations in 8-bit floats, whose rows are scaled when computed, each by its greatest number."""

    type: Literal["float"]
    dynamic: Literal[True]


class _Group(ModelFile):
    weights: _Weights
    input_activations: _Activations | None = None
    output_activations: None = None
    format: Literal["pack-quantized", "int-quantized", "float-quantized"] | None = None


class _CompressedTensors(ModelFile):
    quant_method: Literal["compressed-tensors"]
    format: Literal["pack-quantized", "int-quantized", "float-quantized"]
    config_groups: Annotated[dict[str, _Group], Field(min_length=1, max_length=1)]
    kv_cache_scheme: None = None
    sparsity_config: dict[str, Any] | None = None


_Said = Annotated[
    _Gptq | _Awq | _Bitsandbytes | _Fp8 | _Mxfp4 | _CompressedTensors, Field(discriminator="quant_method")
]
_SAID: TypeAdapter[_Said] = TypeAdapter(_Said)


def checkpoint_format(said: Any) -> CheckpointFormat:
    """Returns the format of a `quantization_config`. Raises ValueError naming the field that is not supported."""
    try:
        found = _SAID.validate_python(said)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        field = ".".join(("quantization_config", *map(str, problem["loc"])))
        raise ValueError(f"{field}: {problem['msg']}, got {str(problem['input'])[:200]!r}") from None
    if isinstance(found, _Gptq):
        return Gptq(found.bits, found.group_size, 1 if found.checkpoint_format == "gptq" else 0)
    if isinstance(found, _Awq):
        return Awq(found.group_size)
    if isinstance(found, _Fp8):
        return Fp8("weight_scale_inv", *found.weight_block_size)
    if isinstance(found, _Mxfp4):
        return Mxfp4()
    if isinstance(found, _Bitsandbytes):
        return Int8("SCB", 127, flat=True)
    return _compressed(found)


_STRATEGIES = {"int": ("channel", "group"), "float": ("channel", "tensor")}


def _compressed(found: _CompressedTensors) -> CheckpointFormat:
    (group,) = found.config_groups.values()
    weights = group.weights
    size = -1 if weights.strategy == "channel" else weights.group_size or -1
    form, is_float = group.format or found.format, weights.type == "float"
    if is_float != (form == "float-quantized") or weights.strategy not in _STRATEGIES[weights.type]:
        raise ValueError(f"quantization_config.format: {form!r}, {weights.type} by {weights.strategy} is not supported")
    if is_float:
        return Fp8("weight_scale", -1 if weights.strategy == "tensor" else 1, -1)
    if group.input_activations:
        raise ValueError("quantization_config.input_activations: of integers they are not supported")
    if form == "pack-quantized":
        return PackQuantized(weights.num_bits, size, weights.symmetric)
    if weights.num_bits != 8 or not weights.symmetric:
        raise ValueError("quantization_config.format: 'int-quantized' is supported in 8 bits and symmetric only")
    return Int8("weight_scale", 1, size)


def _weight(codes: Tensor, scales: Tensor, zeros: Tensor, bits: int, order: Tensor | None = None) -> QuantizedWeight:
    codes, scales = codes if order is None else codes[:, order], scales.float()
    offsets = (-zeros.float() * scales).contiguous()
    return QuantizedWeight(codes.to(torch.uint8).contiguous(), scales.contiguous(), offsets, bits, order)


def _order(found: Mapping[str, Tensor], name: str, group: int) -> Tensor | None:
    """Returns the inputs ordered by group, from the tensor `name`; None if they lie in that order already."""
    if name not in found:
        return None
    groups, in_order = found[name].long(), torch.arange(len(found[name])) // group
    if torch.equal(groups, in_order) or bool((groups < 0).all()):  # -1: the inputs keep their order
        return None
    order = groups.argsort(stable=True)
    if not torch.equal(groups[order], in_order):
        raise ValueError(f"{name}: its groups are not of {group} inputs each")
    return order


def _unpacked(packed: Tensor, bits: int) -> Tensor:
    """Unpacks the numbers of each int32 along the last dimension, the lowest bits first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return (packed[..., None] >> shifts & (1 << bits) - 1).flatten(-2)


def _group(size: int, inputs: int) -> int:
    group = inputs if size == -1 else size
    if group < 2 or group % 2 or inputs % group:
        raise ValueError(f"quantization_config.group_size: {size} does not divide {inputs} inputs")
    return group


def _divides(what: str, number: int, each: int) -> None:
    if number % each:
        raise ValueError(f"quantization_config.bits: {number} {what} cannot be packed by {each}")
