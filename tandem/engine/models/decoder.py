"""The Llama-like decoder: Llama, Mistral, Qwen2 and Qwen3 are this one with a bias or a norm more or less.

    input_ids ─ embed ─> x ─┬─ norm, qkv, rope, attend, o ─(+)─┬─ norm, gate_up, silu, down ─(+)─> … ─ norm ─> logits
                            └──────────────────────────────┘   └─────────────────────────────┘

Tokens of all sequences lie in one row, (tokens, …). The model knows nothing of sequences, paging or ranks: how a token
sees the ones before it is `attend`'s business. Its weights are held once; q, k, v and gate, up are fused, and
`checkpoint_tensors` says which part of them each tensor of a checkpoint fills. What computes is `ops`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from tandem.engine.models.config import ModelConfig
from tandem.engine.models.ops import Ops, TorchOps
from tandem.engine.models.rope import cos_sin, inverse_frequencies


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

    def parts(self, names: tuple[str, ...], sizes: tuple[int, ...]) -> Iterator[tuple[str, Tensor]]:
        """The checkpoint's tensors for `names`, whose outputs lie one after the other."""
        for kind, tensor in (("weight", self.weight), ("bias", self.bias)):
            if tensor is not None:
                for name, part in zip(names, torch.split(tensor, list(sizes)), strict=True):
                    yield f"{name}.{kind}", part


class Attention:
    def __init__(self, config: ModelConfig, layer: int, place: Tensor, ops: Ops) -> None:
        self.layer, self.ops, self.heads = layer, ops, (config.num_heads, config.num_kv_heads)
        self.sizes = tuple(config.head_dim * n for n in (config.num_heads, config.num_kv_heads, config.num_kv_heads))
        self.qkv = Linear(config.hidden_size, sum(self.sizes), config.qkv_bias, place)
        self.o = Linear(self.sizes[0], config.hidden_size, config.o_bias, place)
        self.eps, self.norms = config.rms_norm_eps, None
        if config.qk_norm:
            self.norms = place.new_empty(config.head_dim), place.new_empty(config.head_dim)

    def __call__(self, x: Tensor, residual: Tensor, angles: Tensor, attend: Attend) -> Tensor:
        qkv = self.ops.linear(x, self.qkv.weight, self.qkv.bias)
        q, k, v = self.ops.split_heads(qkv, self.heads, self.norms, self.eps, angles)
        out = attend(self.layer, q, k, v).reshape(len(x), -1)
        return self.ops.linear(out, self.o.weight, self.o.bias, residual)

    def checkpoint_tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.qkv.parts(("q_proj", "k_proj", "v_proj"), self.sizes)
        yield from self.o.parts(("o_proj",), (len(self.o.weight),))
        yield from zip(("q_norm.weight", "k_norm.weight"), self.norms or (), strict=False)


class MLP:
    def __init__(self, config: ModelConfig, place: Tensor, ops: Ops) -> None:
        self.ops = ops
        self.gate_up = Linear(config.hidden_size, 2 * config.intermediate_size, config.mlp_bias, place)
        self.down = Linear(config.intermediate_size, config.hidden_size, config.mlp_bias, place)

    def __call__(self, x: Tensor, residual: Tensor) -> Tensor:
        inner = self.ops.silu_mul(self.ops.linear(x, self.gate_up.weight, self.gate_up.bias))
        return self.ops.linear(inner, self.down.weight, self.down.bias, residual)

    def checkpoint_tensors(self) -> Iterator[tuple[str, Tensor]]:
        size = len(self.gate_up.weight) // 2
        yield from self.gate_up.parts(("gate_proj", "up_proj"), (size, size))
        yield from self.down.parts(("down_proj",), (len(self.down.weight),))


class DecoderLayer:
    def __init__(self, config: ModelConfig, layer: int, place: Tensor, ops: Ops) -> None:
        self.ops, self.eps = ops, config.rms_norm_eps
        self.input_norm, self.post_norm = place.new_empty(config.hidden_size), place.new_empty(config.hidden_size)
        self.attention = Attention(config, layer, place, ops)
        self.mlp = MLP(config, place, ops)

    def __call__(self, x: Tensor, angles: Tensor, attend: Attend) -> Tensor:
        x = self.attention(self.ops.rms_norm(x, self.input_norm, self.eps), x, angles, attend)
        return self.mlp(self.ops.rms_norm(x, self.post_norm, self.eps), x)

    def checkpoint_tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield "input_layernorm.weight", self.input_norm
        yield "post_attention_layernorm.weight", self.post_norm
        yield from ((f"self_attn.{name}", tensor) for name, tensor in self.attention.checkpoint_tensors())
        yield from ((f"mlp.{name}", tensor) for name, tensor in self.mlp.checkpoint_tensors())

    def linears(self) -> tuple[Linear, ...]:
        return self.attention.qkv, self.attention.o, self.mlp.gate_up, self.mlp.down


class Decoder:
    """Weights of `config`, uninitialized, in `dtype` on `device`; fill `checkpoint_tensors`, then `pack`."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: str = "cpu", ops: Ops | None = None) -> None:
        place = torch.empty(0, dtype=dtype, device=device)
        self.config, self.inverse = config, inverse_frequencies(config.rope, config.head_dim).to(device)
        self.ops: Ops = ops or TorchOps()
        self.embed = place.new_empty(config.vocab_size, config.hidden_size)
        self.layers = [DecoderLayer(config, layer, place, self.ops) for layer in range(config.num_layers)]
        self.norm = place.new_empty(config.hidden_size)
        self.lm_head = self.embed if config.tie_word_embeddings else torch.empty_like(self.embed)

    def __call__(self, input_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Last hidden states (tokens, hidden_size) of `input_ids` (tokens,) at `positions` (tokens,)."""
        x = self.ops.embedding(input_ids, self.embed)
        angles = cos_sin(self.inverse, positions, self.ops.angle_dtype or x.dtype)
        for layer in self.layers:
            x = layer(x, angles, attend)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """(rows, vocab_size) float32 for the hidden states of some tokens, (rows, hidden_size)."""
        return self.ops.logits(self.ops.rms_norm(hidden, self.norm, self.config.rms_norm_eps), self.lm_head)

    def pack(self) -> None:
        """The weights are filled: lay them out as the operations want them. `checkpoint_tensors` is void after it."""
        for weight in (self.embed, *([] if self.lm_head is self.embed else [self.lm_head])):
            self.ops.pack(weight)
        for layer in self.layers:
            for linear in layer.linears():
                self.ops.pack(linear.weight)

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """Every tensor a checkpoint must hold, by its Hugging Face name, as the storage it is to fill."""
        tensors = {"model.embed_tokens.weight": self.embed, "model.norm.weight": self.norm}
        if self.lm_head is not self.embed:
            tensors["lm_head.weight"] = self.lm_head
        for number, layer in enumerate(self.layers):
            tensors |= {f"model.layers.{number}.{name}": part for name, part in layer.checkpoint_tensors()}
        return tensors
