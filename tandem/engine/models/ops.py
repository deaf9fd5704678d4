"""The operations a decoder is made of, and torch's own of them, for any device and dtype."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.engine.models.rope import rotate


class Ops(Protocol):
    """Rows are tokens. Weights are (outputs, inputs) and given to `pack` once, after they were filled."""

    @property
    def angle_dtype(self) -> torch.dtype | None:
        """What `angles` are computed in; None for the activations' own."""

    def pack(self, weight: Tensor) -> None:
        """Put a filled weight into the layout that `linear`, `logits` and `embedding` read it in, in place."""

    def embedding(self, ids: Tensor, weight: Tensor) -> Tensor:
        """Rows `ids` (tokens,) of the weight."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
        """x weight^T + bias + residual."""

    def logits(self, x: Tensor, weight: Tensor) -> Tensor:
        """x weight^T in float32."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up of rows (gate | up)."""

    def split_heads(
        self, qkv: Tensor, heads: tuple[int, int], norms: tuple[Tensor, Tensor] | None, eps: float, angles: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q (tokens, heads, head_dim) and k, v (tokens, kv_heads, head_dim) of rows (q | k | v).

        q and k are normed by `norms`, if any, and turned by `angles` (2, tokens, 1, head_dim / 2): cos and sin.
        """


class TorchOps:
    """What torch offers, weights as checkpoints have them."""

    angle_dtype = None

    def pack(self, weight: Tensor) -> None:
        """The layout stays."""

    def embedding(self, ids: Tensor, weight: Tensor) -> Tensor:
        return F.embedding(ids, weight)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
        out = F.linear(x, weight, bias)
        return out if residual is None else residual + out

    def logits(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x, weight).float()

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, eps)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def split_heads(
        self, qkv: Tensor, heads: tuple[int, int], norms: tuple[Tensor, Tensor] | None, eps: float, angles: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        num_heads, kv_heads = heads
        head_dim = qkv.shape[1] // (num_heads + 2 * kv_heads)
        q, k, v = torch.split(qkv.view(len(qkv), -1, head_dim), [num_heads, kv_heads, kv_heads], dim=1)
        if norms is not None:
            q, k = self.rms_norm(q, norms[0], eps), self.rms_norm(k, norms[1], eps)
        cos, sin = angles
        return rotate(q, cos, sin), rotate(k, cos, sin), v
