"""The Llama-like decoder: Llama, Mistral, Qwen2 and Qwen3 are this one with a bias or a norm more or less.

    input_ids ─ embed ─> x ─┬─ norm, qkv, rope, attend, o ─(+)─┬─ norm, gate_up, silu, down ─(+)─> … ─ norm ─> logits
                            └──────────────────────────────┘   └─────────────────────────────┘

Tokens of all sequences lie in one row, (tokens, …). The model knows nothing of sequences, paging or ranks: how a token
sees the ones before it is `attend`'s business. Its weights are held once; q, k, v and gate, up are fused, and
`checkpoint_tensors` says which part of them each tensor of a checkpoint fills.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.engine.models.config import ModelConfig
from tandem.engine.models.rope import cos_sin, inverse_frequencies, rotate
from tandem.engine.quantization import Fp8Weight, QuantizedWeight, quantize, rounded

# A BLAS sums in another order for fewer rows, and for what is left over of a multiple where threads share the rows.
# MKL's strict mode knows one order; it is read at the first product. Others are given rows in fours.
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
ROWS_ALIKE = 4
# Without the instructions for it torch multiplies bfloat16 number by number: a product of so many rows or more is
# faster where rows and weights, large as they may be, are made float32 first.
ROWS_WIDENED = 32
_SLOW_BFLOAT16 = torch._C._has_mkldnn and not torch.ops.mkldnn._is_mkldnn_bf16_supported()


class Attend(Protocol):
    """How tokens see the ones before them."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of q (tokens, heads, head_dim) over k, v (tokens, kv_heads, head_dim) and all before them.

        Returns (tokens, heads, head_dim).
        """


class Adapt(Protocol):
    """A function that adds to the outputs of linear layers."""

    def __call__(self, layer: int, name: str, x: Tensor, out: Tensor) -> None:
        """To `out`, what the linear layer `name` (qkv, o, gate_up or down) made of `x`."""


def unadapted(layer: int, name: str, x: Tensor, out: Tensor) -> None:
    pass


class Linear:
    def __init__(self, inputs: int, outputs: int, bias: bool, place: Tensor) -> None:
        self.weight: Tensor | QuantizedWeight | Fp8Weight = place.new_empty(outputs, inputs)
        self.bias = place.new_empty(outputs) if bias else None

    def __call__(self, x: Tensor) -> Tensor:
        if isinstance(self.weight, Fp8Weight):
            product = self.weight.product(x)
            return product if self.bias is None else product + self.bias
        return linear(x, dense(self.weight, x.dtype), self.bias)

    def parts(self, names: tuple[str, ...], sizes: tuple[int, ...]) -> Iterator[tuple[str, Tensor]]:
        """The checkpoint's tensors for `names`, whose outputs lie one after the other."""
        for kind, tensor in (("weight", self.weight), ("bias", self.bias)):
            if isinstance(tensor, Tensor):
                for name, part in zip(names, torch.split(tensor, list(sizes)), strict=True):
                    yield f"{name}.{kind}", part


class Attention:
    def __init__(self, config: ModelConfig, layer: int, place: Tensor) -> None:
        self.layer, self.heads = layer, (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        self.sizes = tuple(config.head_dim * n for n in self.heads)
        self.qkv = Linear(config.hidden_size, sum(self.sizes), config.qkv_bias, place)
        self.o = Linear(self.sizes[0], config.hidden_size, config.o_bias, place)
        self.eps, self.norms = config.rms_norm_eps, None
        if config.qk_norm:
            self.norms = place.new_empty(config.head_dim), place.new_empty(config.head_dim)

    def __call__(self, x: Tensor, angles: Tensor, attend: Attend, adapt: Adapt) -> Tensor:
        qkv = self.qkv(x)
        adapt(self.layer, "qkv", x, qkv)
        q, k, v = torch.split(qkv.view(len(x), sum(self.heads), -1), list(self.heads), dim=1)
        if self.norms is not None:
            q, k = rms_norm(q, self.norms[0], self.eps), rms_norm(k, self.norms[1], self.eps)
        cos, sin = angles
        attended = attend(self.layer, rotate(q, cos, sin), rotate(k, cos, sin), v).reshape(len(x), -1)
        out = self.o(attended)
        adapt(self.layer, "o", attended, out)
        return out

    def checkpoint_tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.qkv.parts(("q_proj", "k_proj", "v_proj"), self.sizes)
        yield from self.o.parts(("o_proj",), (self.o.weight.shape[0],))
        yield from zip(("q_norm.weight", "k_norm.weight"), self.norms or (), strict=False)


class MLP:
    def __init__(self, config: ModelConfig, layer: int, place: Tensor) -> None:
        self.layer = layer
        self.gate_up = Linear(config.hidden_size, 2 * config.intermediate_size, config.mlp_bias, place)
        self.down = Linear(config.intermediate_size, config.hidden_size, config.mlp_bias, place)

    def __call__(self, x: Tensor, adapt: Adapt) -> Tensor:
        gate_up = self.gate_up(x)
        adapt(self.layer, "gate_up", x, gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        inner = F.silu(gate) * up
        out = self.down(inner)
        adapt(self.layer, "down", inner, out)
        return out

    def checkpoint_tensors(self) -> Iterator[tuple[str, Tensor]]:
        size = self.gate_up.weight.shape[0] // 2
        yield from self.gate_up.parts(("gate_proj", "up_proj"), (size, size))
        yield from self.down.parts(("down_proj",), (self.down.weight.shape[0],))


class DecoderLayer:
    def __init__(self, config: ModelConfig, layer: int, place: Tensor) -> None:
        self.eps = config.rms_norm_eps
        self.input_norm, self.post_norm = place.new_empty(config.hidden_size), place.new_empty(config.hidden_size)
        self.attention = Attention(config, layer, place)
        self.mlp = MLP(config, layer, place)

    def __call__(self, x: Tensor, angles: Tensor, attend: Attend, adapt: Adapt) -> Tensor:
        x = x + self.attention(rms_norm(x, self.input_norm, self.eps), angles, attend, adapt)
        return x + self.mlp(rms_norm(x, self.post_norm, self.eps), adapt)

    def checkpoint_tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield "input_layernorm.weight", self.input_norm
        yield "post_attention_layernorm.weight", self.post_norm
        yield from ((f"self_attn.{name}", tensor) for name, tensor in self.attention.checkpoint_tensors())
        yield from ((f"mlp.{name}", tensor) for name, tensor in self.mlp.checkpoint_tensors())

    def linears(self) -> tuple[Linear, ...]:
        return self.attention.qkv, self.attention.o, self.mlp.gate_up, self.mlp.down


class Decoder:
    """Weights of `config`, uninitialized, in `dtype` on `device`; fill `checkpoint_tensors`."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: str = "cpu") -> None:
        place = torch.empty(0, dtype=dtype, device=device)
        self.config, self.inverse = config, inverse_frequencies(config.rope, config.head_dim).to(device)
        self.embed: Tensor | QuantizedWeight = place.new_empty(config.vocab_size, config.hidden_size)
        self.layers = [DecoderLayer(config, layer, place) for layer in range(config.num_layers)]
        self.norm = place.new_empty(config.hidden_size)
        self.lm_head: Tensor | QuantizedWeight = self.embed
        if not config.tie_word_embeddings:
            self.lm_head = place.new_empty(config.vocab_size, config.hidden_size)

    def __call__(
        self, input_ids: Tensor, positions: Tensor, attend: Attend, adapt: Adapt | None = None,
        enter: Callable[[int, Tensor], None] | None = None,
    ) -> Tensor:  # fmt: skip
        """Last hidden states (tokens, hidden_size) of `input_ids` (tokens,) at `positions` (tokens,).

        `enter` is called with each layer's number and what goes into it.
        """
        x = self._embedded(input_ids)
        angles = cos_sin(self.inverse, positions, x.dtype)
        for number, layer in enumerate(self.layers):
            if enter is not None:
                enter(number, x)
            x = layer(x, angles, attend, adapt or unadapted)
        return x

    def quantize(self, method: str) -> None:
        """By int8 or int4 all weights but norms and biases, and an embedding that is not the head, too; by fp8 those of
        the layers."""
        for linear in (linear for layer in self.layers for linear in layer.linears()):
            assert isinstance(linear.weight, Tensor)
            linear.weight = rounded(linear.weight) if method == "fp8" else quantize(linear.weight, method)
        if method == "fp8":
            return
        tied = self.lm_head is self.embed
        assert isinstance(self.lm_head, Tensor)
        self.lm_head = quantize(self.lm_head, "int8")
        self.embed = self.lm_head if tied else self.embed

    def _embedded(self, input_ids: Tensor) -> Tensor:
        if isinstance(self.embed, QuantizedWeight):
            return self.embed.rows(input_ids, self.norm.dtype)
        return F.embedding(input_ids, self.embed)

    def logits(self, hidden: Tensor) -> Tensor:
        """(rows, vocab_size) float32 for the hidden states of some tokens, (rows, hidden_size)."""
        normed = rms_norm(hidden, self.norm, self.config.rms_norm_eps)
        return linear(normed, dense(self.lm_head, normed.dtype)).float()

    def fused(self) -> Iterator[tuple[Linear, tuple[str, ...], tuple[int, ...]]]:
        """Each linear layer, and the names in a checkpoint and outputs of those that it is made of."""
        for number, layer in enumerate(self.layers):
            at, attention, inner = f"model.layers.{number}", layer.attention, layer.mlp.gate_up.weight.shape[0] // 2
            names = tuple(f"{at}.self_attn.{part}_proj" for part in "qkvo")
            yield attention.qkv, names[:3], attention.sizes
            yield attention.o, names[3:], (attention.o.weight.shape[0],)
            yield layer.mlp.gate_up, (f"{at}.mlp.gate_proj", f"{at}.mlp.up_proj"), (inner, inner)
            yield layer.mlp.down, (f"{at}.mlp.down_proj",), (layer.mlp.down.weight.shape[0],)

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """Every tensor a checkpoint must hold, by its Hugging Face name, as the storage it is to fill."""
        assert isinstance(self.embed, Tensor)
        assert isinstance(self.lm_head, Tensor)
        tensors = {"model.embed_tokens.weight": self.embed, "model.norm.weight": self.norm}
        if self.lm_head is not self.embed:
            tensors["lm_head.weight"] = self.lm_head
        for number, layer in enumerate(self.layers):
            tensors |= {f"model.layers.{number}.{name}": part for name, part in layer.checkpoint_tensors()}
        return tensors


def is_exact(x: Tensor) -> bool:
    """True where a row of `x` is to come to the same numbers, bit for bit, whatever rows lie beside it."""
    return x.dtype is torch.float32 and x.is_cpu


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """As torch's; where that is exact, each row's sums go the same way."""
    if _SLOW_BFLOAT16 and len(x) >= ROWS_WIDENED and x.is_cpu and x.dtype is torch.bfloat16:
        return F.linear(x.float(), weight.float(), None if bias is None else bias.float()).bfloat16()
    if not is_exact(x) or not (missing := -len(x) % ROWS_ALIKE):
        return F.linear(x, weight, bias)
    return F.linear(F.pad(x, (0, 0, 0, missing)), weight, bias)[: len(x)]


def dense(weight: Tensor | QuantizedWeight, dtype: torch.dtype) -> Tensor:
    return weight if isinstance(weight, Tensor) else weight.dense(dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)
