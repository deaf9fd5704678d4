"""Latent attention (MLA): the cache holds one vector a token, from which all heads' keys and values derive.

    x ─ kv_a ─┬─ norm ─> latent ─┐                                          ┌─ up_v of each head ─ o ─> out
              └─ rope ─> key ────┴─> held: latent | key ─┐                   │
    x ─ q ────┬─ up_k of each head ─> as wide as a latent├─ attend ─> latents' mean
              └─ rope ───────────────────────────────────┘

Keys and values are never computed: queries are projected into the space of latents, and attention's results are
projected back. So all heads share one key, latent | key, which is also their value. A cache has equal room for keys and
values: each holds one half of the vector.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tandem.engine.models.attention import Attend, Scope
from tandem.engine.models.config import ModelConfig
from tandem.engine.models.linear import Adapt, Linear, dense, is_exact, linear, rms_norm
from tandem.engine.models.rope import Angles, rotate
from tandem.engine.quantization import Fp8Weight


class LatentAttention:
    """Latent attention in the place of a layer's Attention; adapters do not change it."""

    def __init__(self, config: ModelConfig, layer: int, place: Tensor) -> None:
        assert config.latent is not None
        self.layer, self.heads, self._config = layer, config.num_heads, config.latent
        self.norms, self.eps, self._interleaved = None, config.rms_norm_eps, config.rope_interleaved
        latent, hidden, biased = config.latent, config.hidden_size, config.qkv_bias
        of_queries = self.heads * (latent.key + latent.turned)
        self.q_a: Linear | None = None
        if latent.query:
            self.q_a = Linear(hidden, {"self_attn.q_a_proj": latent.query}, biased, place)
            self._q_norm = place.new_empty(latent.query)
        name = "q_b_proj" if latent.query else "q_proj"
        self.q = Linear(latent.query or hidden, {f"self_attn.{name}": of_queries}, False, place)
        self.kv_a = Linear(hidden, {"self_attn.kv_a_proj_with_mqa": latent.rank + latent.turned}, biased, place)
        self._kv_norm = place.new_empty(latent.rank)
        self.kv_b = Linear(latent.rank, {"self_attn.kv_b_proj": self.heads * (latent.key + latent.value)}, False, place)
        self.o = Linear(self.heads * latent.value, {"self_attn.o_proj": hidden}, config.o_bias, place)
        self.scope = Scope(is_latent=True)
        # `attend` divides scores by the root of the vector's size, which it takes for the head size; undo that here.
        self._q_scale = (2 * config.head_dim) ** 0.5 * config.attention_scale

    def __call__(self, x: Tensor, angles: Angles | None, attend: Attend, adapt: Adapt) -> Tensor:
        assert angles is not None
        latent, rows = self._config, len(x)
        up_k, up_v = self._ups(x.dtype)
        of_queries = x if self.q_a is None else rms_norm(self.q_a(x), self._q_norm, latent.eps)
        q, turned = torch.split(self.q(of_queries).view(rows, self.heads, -1), [latent.key, latent.turned], dim=-1)
        held, key = torch.split(self.kv_a(x), [latent.rank, latent.turned], dim=-1)
        key = rotate(key[:, None], angles, self._interleaved)[:, 0]
        held = torch.cat((rms_norm(held, self._kv_norm, latent.eps), key), dim=-1)
        q = torch.cat((_by_head(q, up_k), rotate(turned, angles, self._interleaved)), dim=-1) * self._q_scale
        k, v = held[:, None].chunk(2, dim=-1)
        found = attend(self.layer, q, k, v, self.scope)[..., : latent.rank]
        return self.o(_by_head(found, up_v).reshape(rows, -1))

    def _ups(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Returns each head's up projections, outputs first: of keys (heads, latent, key), of values (heads, value,
        latent)."""
        weight = self.kv_b.weight
        whole = weight.dense(dtype) if isinstance(weight, Fp8Weight) else dense(weight, dtype)
        by_head = whole.view(self.heads, -1, self._config.rank)
        up_k, up_v = torch.split(by_head, [self._config.key, self._config.value], dim=1)
        return up_k.transpose(1, 2), up_v

    def linears(self) -> tuple[Linear, ...]:
        first = () if self.q_a is None else (self.q_a,)
        return *first, self.q, self.kv_a, self.kv_b, self.o

    def checkpoint_tensors(self) -> Iterator[tuple[str, Tensor]]:
        for part in self.linears():
            yield from part.checkpoint_tensors()
        if self.q_a is not None:
            yield "self_attn.q_a_layernorm.weight", self._q_norm
        yield "self_attn.kv_a_layernorm.weight", self._kv_norm


def _by_head(x: Tensor, weights: Tensor) -> Tensor:
    """Multiplies x (tokens, heads, inputs) by heads' weights (heads, outputs, inputs): (tokens, heads, outputs)."""
    if is_exact(x):
        return torch.stack([linear(x[:, head], weight) for head, weight in enumerate(weights)], dim=1)
    return torch.einsum("thi,hoi->tho", x, weights)
