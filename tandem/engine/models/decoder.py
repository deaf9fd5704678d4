"""The Llama-like decoder: Llama, Mistral, Qwen2 and Qwen3 are this one with a bias or a norm more or less.

    input_ids ─ embed ─> x ─┬─ norm, qkv, rope, attend, o ─(+)─┬─ norm, gate_up, silu, down ─(+)─> … ─ norm ─> logits
                            └──────────────────────────────┘   └─────────────────────────────┘

Tokens of all sequences lie in one row, (tokens, …). The model knows nothing of sequences, paging or ranks: how a token
sees the ones before it is `attend`'s business. Its weights are held once; q, k, v and gate, up are fused, and
`checkpoint_tensors` says which part of them each tensor of a checkpoint fills.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.engine.models.config import ModelConfig
from tandem.engine.models.rope import cos_sin, inverse_frequencies, rotate


class Attend(Protocol):
    """How tokens see the ones before them."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of q (tokens, heads, head_dim) over k, v (tokens, kv_heads, head_dim) and all before them.

        Returns (tokens, heads, head_dim).
        """


class Linear:
    def __init__(self, inputs: int, outputs: int, bias: bool, place: Tensor) -> None:
        self.weight = place.new_empty(outputs, inputs)
        self.bias = place.new_empty(outputs) if bias else None

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def parts(self, names: tuple[str, ...], sizes: tuple[int, ...]) -> Iterator[tuple[str, Tensor]]:
        """The checkpoint's tensors for `names`, whose outputs lie one after the other."""
        for kind, tensor in (("weight", self.weight), ("bias", self.bias)):
            if tensor is not None:
                for name, part in zip(names, torch.split(tensor, list(sizes)), strict=True):
                    yield f"{name}.{kind}", part


class RMSNorm:
    def __init__(self, size: int, eps: float, place: Tensor) -> None:
        self.weight, self.eps = place.new_empty(size), eps

    def __call__(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Attention:
    def __init__(self, config: ModelConfig, layer: int, place: Tensor) -> None:
        self.layer, self.heads = layer, [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        self.head_dim, self.sizes = config.head_dim, tuple(config.head_dim * n for n in self.heads)
        self.qkv = Linear(config.hidden_size, sum(self.sizes), config.qkv_bias, place)
        self.o = Linear(self.sizes[0], config.hidden_size, config.o_bias, place)
        self.norms: dict[str, RMSNorm] = {}
        if config.qk_norm:
            self.norms = {n: RMSNorm(config.head_dim, config.rms_norm_eps, place) for n in ("q_norm", "k_norm")}

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        q, k, v = torch.split(self.qkv(x).view(len(x), -1, self.head_dim), self.heads, dim=1)
        if self.norms:
            q, k = self.norms["q_norm"](q), self.norms["k_norm"](k)
        out = attend(self.layer, rotate(q, cos, sin), rotate(k, cos, sin), v)
        return self.o(out.reshape(len(x), -1))

    def checkpoint_tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.qkv.parts(("q_proj", "k_proj", "v_proj"), self.sizes)
        yield from self.o.parts(("o_proj",), (len(self.o.weight),))
        yield from ((f"{name}.weight", norm.weight) for name, norm in self.norms.items())


class MLP:
    def __init__(self, config: ModelConfig, place: Tensor) -> None:
        self.gate_up = Linear(config.hidden_size, 2 * config.intermediate_size, config.mlp_bias, place)
        self.down = Linear(config.intermediate_size, config.hidden_size, config.mlp_bias, place)

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)

    def checkpoint_tensors(self) -> Iterator[tuple[str, Tensor]]:
        size = len(self.gate_up.weight) // 2
        yield from self.gate_up.parts(("gate_proj", "up_proj"), (size, size))
        yield from self.down.parts(("down_proj",), (len(self.down.weight),))


class DecoderLayer:
    def __init__(self, config: ModelConfig, layer: int, place: Tensor) -> None:
        self.input_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, place)
        self.attention = Attention(config, layer, place)
        self.post_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, place)
        self.mlp = MLP(config, place)

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        x = x + self.attention(self.input_norm(x), cos, sin, attend)
        return x + self.mlp(self.post_norm(x))

    def checkpoint_tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield "input_layernorm.weight", self.input_norm.weight
        yield "post_attention_layernorm.weight", self.post_norm.weight
        yield from ((f"self_attn.{name}", tensor) for name, tensor in self.attention.checkpoint_tensors())
        yield from ((f"mlp.{name}", tensor) for name, tensor in self.mlp.checkpoint_tensors())


class Decoder:
    """Weights of `config`, uninitialized, in `dtype` on `device`."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: str = "cpu") -> None:
        place = torch.empty(0, dtype=dtype, device=device)
        self.config, self.inverse = config, inverse_frequencies(config.rope, config.head_dim).to(device)
        self.embed = place.new_empty(config.vocab_size, config.hidden_size)
        self.layers = [DecoderLayer(config, layer, place) for layer in range(config.num_layers)]
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, place)
        self.lm_head = self.embed if config.tie_word_embeddings else torch.empty_like(self.embed)

    def __call__(self, input_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Last hidden states (tokens, hidden_size) of `input_ids` (tokens,) at `positions` (tokens,)."""
        x = F.embedding(input_ids, self.embed)
        cos, sin = cos_sin(self.inverse, positions, x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin, attend)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """(rows, vocab_size) float32 for the hidden states of some tokens, (rows, hidden_size)."""
        return F.linear(self.norm(hidden), self.lm_head).float()

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """Every tensor a checkpoint must hold, by its Hugging Face name, as the storage it is to fill."""
        tensors = {"model.embed_tokens.weight": self.embed, "model.norm.weight": self.norm.weight}
        if self.lm_head is not self.embed:
            tensors["lm_head.weight"] = self.lm_head
        for number, layer in enumerate(self.layers):
            tensors |= {f"model.layers.{number}.{name}": part for name, part in layer.checkpoint_tensors()}
        return tensors
