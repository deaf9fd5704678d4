"""A layer's attention: projections to q, k, v, attention over earlier tokens, and the output projection.

`attend` computes the attention over the tokens before; the layer's Scope defines which tokens, and how.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from tandem.engine.models.config import ModelConfig
from tandem.engine.models.linear import Adapt, Linear, norm_of
from tandem.engine.models.rope import Angles, rotate


@dataclass(frozen=True, slots=True, eq=False)
class Scope:
    """The tokens that a layer's tokens see: the last `window`, themselves included; 0: all. `softcap` bounds scores.

    `sinks` (heads,) are scores of a sink for each head, which takes part in the softmax and has no value. `is_latent`:
    the cached key and value are the halves of one vector, which serves as both key and value.
    """

    window: int = 0
    softcap: float = 0.0
    sinks: Tensor | None = None
    is_latent: bool = False

    @property
    def is_plain(self) -> bool:
        """True if attention is a plain softmax of the scores: no softcap, no sink."""
        return not self.softcap and self.sinks is None


class Attend(Protocol):
    """A function that computes the attention of a step's tokens over their contexts."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scope: Scope) -> Tensor:
        """Computes the attention of q (tokens, heads, head_dim) over k, v (tokens, kv_heads, head_dim) of these tokens
        and of all tokens before them. Returns (tokens, heads, head_dim).
        """


class Attention:
    def __init__(self, config: ModelConfig, layer: int, place: Tensor) -> None:
        self.layer, self.heads = layer, (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        self.sizes = tuple(config.head_dim * n for n in self.heads)
        names = ["self_attn.qkv_proj"] if config.fused_qkv else [f"self_attn.{part}_proj" for part in "qkv"]
        sizes = [sum(self.sizes)] if config.fused_qkv else self.sizes
        self.qkv = Linear(config.hidden_size, dict(zip(names, sizes, strict=True)), config.qkv_bias, place)
        self.o = Linear(self.sizes[0], {"self_attn.o_proj": config.hidden_size}, config.o_bias, place)
        self.eps, self.norms = config.rms_norm_eps, None
        self._norm = norm_of(config)
        if config.qk_norm:
            widths = self.sizes[:2] if config.qk_norm_of_all else (config.head_dim,) * 2
            self.norms = place.new_empty(widths[0]), place.new_empty(widths[1])
        sinks = place.new_empty(config.num_heads) if config.attention_sinks else None
        self.scope = Scope(config.windows[layer] if config.windows else 0, config.attention_softcap, sinks)
        self._interleaved = config.rope_interleaved
        self._q_scale = config.attention_scale * config.head_dim**0.5 if config.attention_scale else 1.0

    def __call__(self, x: Tensor, angles: Angles | None, attend: Attend, adapt: Adapt) -> Tensor:
        """Computes the layer's attention of x.

        `angles`: the tokens' rotary angles; None: this layer rotates nothing.
        """
        qkv = self.qkv(x)
        adapt(self.layer, "qkv", x, qkv)
        q, k, v = torch.split(qkv.view(len(x), sum(self.heads), -1), list(self.heads), dim=1)
        if self.norms is not None:
            q, k = self._normed(q, self.norms[0]), self._normed(k, self.norms[1])
        if angles is not None:
            q, k = rotate(q, angles, self._interleaved), rotate(k, angles, self._interleaved)
        if self._q_scale != 1:
            q = q * self._q_scale
        attended = attend(self.layer, q, k, v, self.scope).reshape(len(x), -1)
        out = self.o(attended)
        adapt(self.layer, "o", attended, out)
        return out

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        """Normalizes each head, or all heads together if `weight` has that many numbers."""
        return self._norm(x.reshape(len(x), -1, len(weight)), weight, self.eps).view(x.shape)

    def linears(self) -> tuple[Linear, ...]:
        return self.qkv, self.o

    def checkpoint_tensors(self) -> Iterator[tuple[str, Tensor]]:
        for linear in self.linears():
            yield from linear.checkpoint_tensors()
        yield from zip(("self_attn.q_norm.weight", "self_attn.k_norm.weight"), self.norms or (), strict=False)
        if self.scope.sinks is not None:
            yield "self_attn.sinks", self.scope.sinks
