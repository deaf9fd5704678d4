"""The decoder: Llama's, with the differences of other families.

    input_ids ─ embed ─> x ─┬─ norm, qkv, rope, attend, o ─(+)─┬─ norm, gate_up, silu, down ─(+)─> … ─ norm ─> logits
                            └──────────────────────────────┘   └─────────────────────────────┘

Tokens of all sequences lie in one row, (tokens, …). The model knows nothing of sequences, paging or ranks: `attend`
computes attention over earlier tokens. Weights are held once; q, k, v and gate, up are fused, and `checkpoint_tensors`
maps each tensor of a checkpoint to the part of a fused weight that it fills.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.engine.models.attention import Attend, Attention
from tandem.engine.models.config import ModelConfig
from tandem.engine.models.experts import Experts
from tandem.engine.models.latent import LatentAttention
from tandem.engine.models.linear import Adapt, Linear, dense, linear, norm_of, unadapted
from tandem.engine.models.mlp import MLP
from tandem.engine.models.rope import Angles, cos_sin, inverse_frequencies
from tandem.engine.quantization import QuantizedWeight, quantize, rounded


class DecoderLayer:
    """A layer. `norms`: before and after attention, before and after the MLP; None where the family has none."""

    def __init__(self, config: ModelConfig, layer: int, place: Tensor) -> None:
        self.eps, self._residual_scale = config.rms_norm_eps, config.residual_scale
        self._norm, self._is_parallel = norm_of(config), config.is_parallel
        self._norm_names = config.norm_names
        self.norms = [place.new_empty(config.hidden_size) if name else None for name in self._norm_names]
        self.attention = LatentAttention(config, layer, place) if config.latent else Attention(config, layer, place)
        has_experts = config.experts is not None and layer in config.experts.layers
        self.mlp = Experts(config, layer, place) if has_experts else MLP(config, layer, place)

    def __call__(self, x: Tensor, angles: Angles | None, attend: Attend, adapt: Adapt) -> Tensor:
        if self._is_parallel:
            normed = self._normed(0, x)
            return x + self.attention(normed, angles, attend, adapt) + self.mlp(normed, adapt)
        x = self._added(x, self._normed(1, self.attention(self._normed(0, x), angles, attend, adapt)))
        return self._added(x, self._normed(3, self.mlp(self._normed(2, x), adapt)))

    def _normed(self, which: int, x: Tensor) -> Tensor:
        weight = self.norms[which]
        return x if weight is None else self._norm(x, weight, self.eps)

    def _added(self, x: Tensor, more: Tensor) -> Tensor:
        return x + more * self._residual_scale if self._residual_scale else x + more

    def checkpoint_tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, norm in zip(self._norm_names, self.norms, strict=True):
            if norm is not None:
                yield f"{name}.weight", norm
        yield from self.attention.checkpoint_tensors()
        yield from self.mlp.checkpoint_tensors()

    def linears(self) -> tuple[Linear, ...]:
        return *self.attention.linears(), *self.mlp.linears()


class Decoder:
    """A decoder with uninitialized weights of `dtype` on `device`; the loader fills its `checkpoint_tensors`."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: str = "cpu") -> None:
        place = torch.empty(0, dtype=dtype, device=device)
        self.config, self._norm = config, norm_of(config)
        rotated = config.latent.turned if config.latent else config.rotary_dim or config.head_dim
        self.inverse = inverse_frequencies(config.rope, rotated).to(device)
        self.local_inverse = inverse_frequencies(config.local_rope or config.rope, rotated).to(device)
        self.embed: Tensor | QuantizedWeight = place.new_empty(config.vocab_size, config.hidden_size)
        # Rounded to the dtype of the embeddings that it scales.
        self.embed_scale = float(torch.tensor(config.embed_scale, dtype=dtype))
        self.layers = [DecoderLayer(config, layer, place) for layer in range(config.num_layers)]
        self.norm = place.new_empty(config.hidden_size)
        self.lm_head: Tensor | QuantizedWeight = self.embed
        if not config.tie_word_embeddings:
            self.lm_head = place.new_empty(config.vocab_size, config.hidden_size)

    def __call__(
        self, input_ids: Tensor, positions: Tensor, attend: Attend, adapt: Adapt | None = None,
        enter: Callable[[int, Tensor], None] | None = None,
    ) -> Tensor:  # fmt: skip
        """Returns the last hidden states (tokens, hidden_size) of `input_ids` (tokens,) at `positions` (tokens,).

        `enter` is called with each layer's number and input.
        """
        x = self._embedded(input_ids)
        angles = self._angles(positions, x.dtype)
        for number, layer in enumerate(self.layers):
            if enter is not None:
                enter(number, x)
            x = layer(x, angles[number], attend, adapt or unadapted)
        return x

    def _angles(self, positions: Tensor, dtype: torch.dtype) -> list[Angles | None]:
        """Returns each layer's rotary angles; None for a layer without rotation."""
        config = self.config
        found = local = cos_sin(self.inverse, positions, dtype, config.rope.attention_factor)
        if config.local_rope is not None:
            local = cos_sin(self.local_inverse, positions, dtype, config.local_rope.attention_factor)
        return [
            None if layer in config.layers_without_rope else local if layer in config.local_layers else found
            for layer in range(config.num_layers)
        ]

    def quantize(self, method: str) -> None:
        """Quantizes the layers' weights by `method`: int8, int4 or fp8. With int8 and int4 the head becomes int8 too.

        Norms, biases and an embedding that is not also the head stay as they are.
        """
        for part in (part for layer in self.layers for part in layer.linears()):
            assert isinstance(part.weight, Tensor)
            part.weight = rounded(part.weight) if method == "fp8" else quantize(part.weight, method)
        if method == "fp8":
            return
        tied = self.lm_head is self.embed
        assert isinstance(self.lm_head, Tensor)
        self.lm_head = quantize(self.lm_head, "int8")
        self.embed = self.lm_head if tied else self.embed

    def _embedded(self, input_ids: Tensor) -> Tensor:
        if isinstance(self.embed, QuantizedWeight):
            x = self.embed.rows(input_ids, self.norm.dtype)
        else:
            x = F.embedding(input_ids, self.embed)
        return x * self.embed_scale if self.embed_scale else x

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns the logits (rows, vocab_size) float32 of hidden states (rows, hidden_size)."""
        normed = self.normed(hidden)
        return self.bounded(linear(normed, dense(self.lm_head, normed.dtype)).float())

    def bounded(self, logits: Tensor) -> Tensor:
        """Returns the head's float32 outputs as the family divides and bounds them."""
        if self.config.logits_divisor:
            logits = logits / self.config.logits_divisor
        cap = self.config.logits_softcap
        return (logits / cap).tanh() * cap if cap else logits

    def normed(self, hidden: Tensor) -> Tensor:
        """Applies the last norm, which the head expects, to hidden states."""
        return self._norm(hidden, self.norm, self.config.rms_norm_eps)

    def fused(self) -> Iterator[tuple[Linear, tuple[str, ...], tuple[int, ...]]]:
        """Yields each linear layer with the checkpoint names and the numbers of outputs of its parts."""
        for number, layer in enumerate(self.layers):
            for part in layer.linears():
                names = tuple(f"model.layers.{number}.{name}" for name in part.parts)
                yield part, names, tuple(part.parts.values())

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """Returns, by Hugging Face name, the storage to fill from each tensor that a checkpoint must hold."""
        assert isinstance(self.embed, Tensor)
        assert isinstance(self.lm_head, Tensor)
        tensors = {"model.embed_tokens.weight": self.embed, "model.norm.weight": self.norm}
        if self.lm_head is not self.embed:
            tensors["lm_head.weight"] = self.lm_head
        for number, layer in enumerate(self.layers):
            tensors |= {f"model.layers.{number}.{name}": part for name, part in layer.checkpoint_tensors()}
        return tensors
