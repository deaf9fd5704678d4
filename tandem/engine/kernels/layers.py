"""A decoder's layers as the kernels read them: each weight's packed copy replaces it, so each is held once."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.engine.kernels.packed import PackedWeight
from tandem.engine.kernels.structs import ExpertsStruct, Layer, Mixture, Weight
from tandem.engine.models import Attention, DecoderLayer, Experts, Linear, ModelConfig
from tandem.engine.quantization import Fp8Weight, QuantizedWeight

PANEL_OUTPUTS, TILE_ROWS = 32, 32
CLAMPED = "clamped_swiglu"  # the activation whose gates and ups alternate


class PackedLayer:
    """A layer's packed weights; `struct` points to them, to the layer's other weights and to its `kv`."""

    def __init__(self, library: ctypes.CDLL, config: ModelConfig, layer: DecoderLayer, kv: Tensor) -> None:
        attention, mlp, is_mixed = layer.attention, layer.mlp, config.activation == CLAMPED
        assert isinstance(attention, Attention)
        self._experts = PackedExperts(library, mlp, is_mixed) if isinstance(mlp, Experts) else None
        dense = mlp.shared if isinstance(mlp, Experts) else mlp
        self._packed = [pack(library, linear) for linear in attention.linears()]
        if dense is not None:
            self._packed += [pack_gate_up(library, dense.gate_up, is_mixed), pack(library, dense.down)]
        q_norm, k_norm = attention.norms or (None, None)
        biases = (None, None) if dense is None else (_bias(dense.gate_up, is_mixed), dense.down.bias)
        self._vectors = (attention.qkv.bias, q_norm, k_norm, attention.o.bias, *biases, attention.scope.sinks)
        weights = [weight.struct for weight in self._packed] + [Weight()] * (4 - len(self._packed))
        experts = ctypes.addressof(self._experts.struct) if self._experts else None
        norms, vectors = (ctypes.c_void_p * 4)(*map(_pointer, layer.norms)), map(_pointer, self._vectors)
        angles, window = _angles(config, attention.layer), attention.scope.window
        self.struct = Layer(*weights, experts, norms, *vectors, angles, window, kv.data_ptr())

    @property
    def weights(self) -> list[Weight]:
        """The weights that each row of a step is multiplied with."""
        return [weight.struct for weight in self._packed]

    @property
    def of_experts(self) -> list[Weight]:
        """The weights that a row is multiplied with if their expert is chosen for it."""
        return self._experts.weights if self._experts else []


class PackedExperts:
    """The packed weights of a layer's experts and of their router."""

    def __init__(self, library: ctypes.CDLL, experts: Experts, is_mixed: bool) -> None:
        router, gate = experts.router, experts.shared_gate
        rows = router.weight if gate is None else torch.cat((router.weight, gate))
        missing = -len(rows) % PANEL_OUTPUTS
        self._router = PackedWeight(library, F.pad(rows, (0, 0, 0, missing)))
        self._gate_up = [pack_gate_up(library, expert.gate_up, is_mixed) for expert in experts.experts]
        self._down = [pack(library, expert.down) for expert in experts.experts]
        self._arrays = [_array(packed) for packed in (self._gate_up, self._down)]
        self._biases = (
            None if router.bias is None else F.pad(router.bias, (0, missing)),
            _stacked([_bias(expert.gate_up, is_mixed) for expert in experts.experts]),
            _stacked([expert.down.bias for expert in experts.experts]),
        )
        self.struct = ExpertsStruct(
            self._router.struct, *map(ctypes.addressof, self._arrays), *map(_pointer, self._biases)
        )

    @property
    def weights(self) -> list[Weight]:
        return [weight.struct for weight in (*self._gate_up, *self._down)]


class MixtureRoom:
    """The facts that the experts of all layers have in common, and room for steps of at most `max_tokens` tokens."""

    def __init__(self, config: ModelConfig, max_tokens: int, like: Tensor) -> None:
        assert config.experts is not None
        experts, pairs = config.experts, max_tokens * config.experts.per_token
        outputs = -(-(experts.count + experts.has_shared_gate) // PANEL_OUTPUTS) * PANEL_OUTPUTS
        self._room = (
            torch.empty(max_tokens, outputs), torch.empty(pairs), torch.empty(pairs, dtype=torch.int32),
            torch.empty(4 * pairs + 1, dtype=torch.int32), like.new_empty(pairs + TILE_ROWS - 1, config.hidden_size),
        )  # fmt: skip
        is_of_chosen = experts.is_normed or experts.scoring == "chosen"
        self.struct = Mixture(
            experts.count, experts.per_token, experts.inner, is_of_chosen, experts.has_shared_gate,
            *(room.data_ptr() for room in self._room), experts.scale,
        )  # fmt: skip


def pack(library: ctypes.CDLL, linear: Linear, halves: bool = False) -> PackedWeight:
    """Packs a layer's weight and frees the original. `halves`: its outputs are (gate | up)."""
    assert not isinstance(linear.weight, Fp8Weight)  # the loader converts fp8 weights on CPUs
    packed = PackedWeight(library, linear.weight, halves)
    linear.weight = torch.empty(0, dtype=torch.bfloat16)
    return packed


def pack_gate_up(library: ctypes.CDLL, gate_up: Linear, is_mixed: bool) -> PackedWeight:
    """Packs the weight of gates and ups. `is_mixed`: they alternate."""
    weight = gate_up.weight
    if is_mixed:
        order = _apart(weight.shape[0])
        if isinstance(weight, QuantizedWeight):
            codes, scales, offsets = (part[order] for part in (weight.codes, weight.scales, weight.offsets))
            gate_up.weight = replace(weight, codes=codes, scales=scales, offsets=offsets)
        elif isinstance(weight, Tensor):
            gate_up.weight = weight[order]
    return pack(library, gate_up, halves=True)


def inner_size(config: ModelConfig, max_tokens: int) -> int:
    """Returns the most numbers between gate-up and down that a step of `max_tokens` tokens has at once."""
    experts = config.experts
    dense = (max_tokens + TILE_ROWS - 1) * max(config.intermediate_size, experts.shared_inner if experts else 0)
    return max(dense, (max_tokens * experts.per_token + TILE_ROWS - 1) * experts.inner) if experts else dense


def _angles(config: ModelConfig, layer: int) -> int:
    if layer in config.layers_without_rope:
        return -1
    return int(config.local_rope is not None and layer in config.local_layers)


def _array(packed: list[PackedWeight]) -> ctypes.Array[Weight]:
    return (Weight * len(packed))(*(weight.struct for weight in packed))


def _stacked(biases: list[Tensor | None]) -> Tensor | None:
    found = [bias for bias in biases if bias is not None]
    return torch.stack(found) if found else None


def _bias(gate_up: Linear, is_mixed: bool) -> Tensor | None:
    bias = gate_up.bias
    return bias if bias is None or not is_mixed else bias[_apart(len(bias))]


def _apart(outputs: int) -> Tensor:
    """Returns which of alternating gates and ups are gates, then which are ups."""
    return torch.arange(outputs).view(-1, 2).T.flatten()


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
