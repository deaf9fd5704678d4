"""A layer's second half: gate, up, down."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch.nn.functional as F
from torch import Tensor

from tandem.engine.models.config import ModelConfig
from tandem.engine.models.linear import Adapt, Linear

GATE_UP_DOWN, FUSED = ("gate_proj", "up_proj", "down_proj"), ("gate_up_proj", "down_proj")
# The constants of gpt-oss's activation, whose gates and ups alternate and are both clamped.
CLAMPED_BOUND, CLAMPED_SLOPE = 7.0, 1.702


def swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def geglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


def clamped_swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up[..., ::2].clamp(max=CLAMPED_BOUND), gate_up[..., 1::2].clamp(-CLAMPED_BOUND, CLAMPED_BOUND)
    return (up + 1) * (gate * (gate * CLAMPED_SLOPE).sigmoid())


ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "": swiglu, "gelu_tanh": geglu, "clamped_swiglu": clamped_swiglu,
}  # fmt: skip


class MLP:
    """An MLP. `name`: its name within a layer of a checkpoint; `parts`: the names of its linear layers there."""

    def __init__(
        self, config: ModelConfig, layer: int, place: Tensor, name: str = "mlp", inner: int = 0,
        parts: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        self.layer, self.activation = layer, ACTIVATIONS[config.activation]
        hidden, inner = config.hidden_size, inner or config.intermediate_size
        *of_gate_up, of_down = parts or (FUSED if config.fused_gate_up else GATE_UP_DOWN)
        sizes = {f"{name}.{part}": 2 * inner // len(of_gate_up) for part in of_gate_up}
        self.gate_up = Linear(hidden, sizes, config.mlp_bias, place)
        self.down = Linear(inner, {f"{name}.{of_down}": hidden}, config.mlp_bias, place)

    def __call__(self, x: Tensor, adapt: Adapt) -> Tensor:
        gate_up = self.gate_up(x)
        adapt(self.layer, "gate_up", x, gate_up)
        inner = self.activation(gate_up)
        out = self.down(inner)
        adapt(self.layer, "down", inner, out)
        return out

    def linears(self) -> tuple[Linear, ...]:
        return self.gate_up, self.down

    def checkpoint_tensors(self) -> Iterator[tuple[str, Tensor]]:
        for part in self.linears():
            yield from part.checkpoint_tensors()
