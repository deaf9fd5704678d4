"""A decoder of which each rank has its shard; the model's own code knows no ranks.

    attention   qkv of its heads ─ attend ─ gather heads ─ its outputs of o ─ gather
    MLP         its outputs of gate and up ─ activation ─ gather ─ its outputs of down ─ gather
    experts     those of its number; gather their outputs
    vocabulary  its tokens' embeddings, and its tokens' logits ─ gather

`rows` has, by the name of a checkpoint's layer or tensor, which of its rows (outputs) the rank holds; what is not in it
is held whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.engine.models import (
    MLP,
    Adapt,
    Attend,
    Attention,
    Decoder,
    Experts,
    LatentAttention,
    Linear,
    ModelConfig,
    Scope,
    dense,
    linear,
    unadapted,
)  # fmt: skip
from tandem.engine.parallel.exchange import RankExchange
from tandem.engine.parallel.rooms import LOGITS_ROWS
from tandem.engine.parallel.sharding import Shard
from tandem.engine.quantization import QuantizedWeight

Rows = dict[str, Sequence[range]]


class ShardedDecoder(Decoder):
    """The shard of a rank. All ranks call it with the same step, and get the same hidden states and logits."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, shard: Shard, exchange: RankExchange) -> None:
        super().__init__(config, dtype)
        self.shard, self.rows, self.exchange = shard, Rows(), exchange
        for number, layer in enumerate(self.layers):
            name = f"model.layers.{number}"
            if isinstance(layer.attention, LatentAttention):
                self._split_latent(layer.attention, name)
            else:
                self._split_attention(layer.attention, name)
            if isinstance(layer.mlp, Experts):
                layer.mlp = ShardedExperts(layer.mlp, shard, exchange)
                if layer.mlp.shared is not None:
                    self._split_mlp(layer.mlp.shared, name)
            else:
                self._split_mlp(layer.mlp, name)
        self._split_vocabulary(config)

    def __call__(
        self, input_ids: Tensor, positions: Tensor, attend: Attend, adapt: Adapt | None = None,
        enter: Callable[[int, Tensor], None] | None = None,
    ) -> Tensor:  # fmt: skip
        width, first = self.config.num_heads * self.config.head_dim, self.heads.start * self.config.head_dim

        heads, kv_heads = (slice(these.start, these.stop) for these in (self.heads, self.kv_heads))

        def attend_all(layer: int, q: Tensor, k: Tensor, v: Tensor, scope: Scope) -> Tensor:
            if self.config.qk_norm_of_all:
                q, k, v = q[:, heads].contiguous(), k[:, kv_heads].contiguous(), v[:, kv_heads].contiguous()
            own = attend(layer, q, k, v, scope)
            if scope.is_latent:  # what is gathered are the heads' values, which are made of this
                return own
            return self.exchange.gathered("attended", own.flatten(1), first, width)

        return super().__call__(input_ids, positions, attend_all, adapt, enter)

    @property
    def heads(self) -> range:
        return self.shard.heads(self.config)

    @property
    def kv_heads(self) -> range:
        return self.shard.kv_heads(self.config)

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns the logits (rows, vocab_size) float32 of at most LOGITS_ROWS hidden states, until the next call."""
        assert len(hidden) <= LOGITS_ROWS
        normed = self.normed(hidden)
        own = linear(normed, dense(self.lm_head, normed.dtype)).float()
        return self.bounded(self.exchange.gathered("logits", own, self._tokens.start, self.config.vocab_size))

    def _embedded(self, input_ids: Tensor) -> Tensor:
        tokens, config = self._tokens, self.config
        whole = self.exchange.place("hidden", len(input_ids), config.hidden_size, self.norm.dtype)
        own = ((input_ids >= tokens.start) & (input_ids < tokens.stop)).nonzero()[:, 0]
        ids = input_ids[own] - tokens.start
        if isinstance(self.embed, QuantizedWeight):
            whole[own] = self.embed.rows(ids, self.norm.dtype)
        else:
            whole[own] = F.embedding(ids, self.embed)
        self.exchange.meet()
        return whole * self.embed_scale if self.embed_scale else whole.clone()  # other layers' outputs come there next

    def _split_attention(self, attention: Attention, name: str) -> None:
        config, dim, heads, kv_heads = self.config, self.config.head_dim, self.heads, self.kv_heads
        q, kv = (range(dim * these.start, dim * these.stop) for these in (heads, kv_heads))
        parts: list[Sequence[range]] = [[q], [kv], [kv]]
        if config.fused_qkv:
            after_q, after_k = dim * config.num_heads, dim * (config.num_heads + config.num_kv_heads)
            parts = [[q, _moved(kv, after_q), _moved(kv, after_k)]]
        self._split(attention.qkv, name, parts)
        if config.qk_norm_of_all:  # each rank norms and rotates the heads of all
            attention.qkv = GatheredHeads(attention.qkv, self.exchange, (q, kv, kv), attention.sizes)
        else:
            attention.heads = len(heads), len(kv_heads), len(kv_heads)
        attention.o = self._gathered(attention.o, name)
        if (sinks := attention.scope.sinks) is not None:
            attention.scope = Scope(attention.scope.window, attention.scope.softcap, sinks[: len(heads)].clone())
            self.rows[f"{name}.self_attn.sinks"] = [heads]

    def _split_latent(self, attention: LatentAttention, name: str) -> None:
        latent, heads = self.config.latent, self.heads
        assert latent is not None
        for part, size in ((attention.q, latent.key + latent.turned), (attention.kv_b, latent.key + latent.value)):
            self._split(part, name, [[range(heads.start * size, heads.stop * size)]])
        attention.heads = len(heads)
        width, o = self.config.num_heads * latent.value, self._gathered(attention.o, name)
        attention.o = GatheringLinear(o, heads.start * latent.value, width)

    def _split_mlp(self, mlp: MLP, name: str) -> None:
        inner = mlp.down.weight.shape[1]
        own = self.shard.outputs(inner)
        is_fused = len(mlp.gate_up.parts) == 1
        self._split(mlp.gate_up, name, [[own, _moved(own, inner)]] if is_fused else [[own], [own]])
        activate = mlp.activation
        mlp.activation = lambda gate_up: self.exchange.gathered("inner", activate(gate_up), own.start, inner)
        mlp.down = self._gathered(mlp.down, name)

    def _split_vocabulary(self, config: ModelConfig) -> None:
        self._tokens = self.shard.outputs(config.vocab_size)
        tied, place = self.lm_head is self.embed, self.norm
        self.embed = place.new_empty(len(self._tokens), config.hidden_size)
        self.lm_head = self.embed if tied else place.new_empty(len(self._tokens), config.hidden_size)
        self.rows |= {"model.embed_tokens": [self._tokens], "lm_head": [self._tokens]}

    def _split(self, layer: Linear, name: str, parts: Sequence[Sequence[range]]) -> None:
        """Leaves of a linear layer the rows `parts` of each of its parts in the checkpoint."""
        for part, rows in zip(layer.parts, parts, strict=True):
            self.rows[f"{name}.{part}"] = rows
            layer.parts[part] = sum(map(len, rows))
        outputs, place = sum(layer.parts.values()), self.norm
        layer.weight = place.new_empty(outputs, layer.weight.shape[1])
        layer.bias = None if layer.bias is None else place.new_empty(outputs)

    def _gathered(self, layer: Linear, name: str) -> GatheredLinear:
        outputs = layer.weight.shape[0]
        own = self.shard.outputs(outputs)
        self._split(layer, name, [[own]])
        return GatheredLinear(layer, self.exchange, own.start, outputs)


class GatheredLinear(Linear):
    """A linear layer of which this rank computes the outputs from `first` on; returns all `outputs`."""

    def __init__(self, of: Linear, exchange: RankExchange, first: int, outputs: int) -> None:
        self.parts, self.weight, self.bias = of.parts, of.weight, of.bias
        self._exchange, self._first, self._outputs = exchange, first, outputs

    def __call__(self, x: Tensor) -> Tensor:
        # A copy of its own, because adapters add to it.
        return self._exchange.gathered("hidden", super().__call__(x), self._first, self._outputs).clone()


class GatheredHeads(Linear):
    """q, k and v, of which this rank computes some columns of each; returns all, of `sizes`."""

    def __init__(self, of: Linear, exchange: RankExchange, own: Sequence[range], sizes: Sequence[int]) -> None:
        self.parts, self.weight, self.bias = of.parts, of.weight, of.bias
        self._exchange, self._sizes = exchange, [len(columns) for columns in own]
        self._outputs = sum(sizes)
        starts = accumulate(sizes, initial=0)
        self._columns = [slice(at + part.start, at + part.stop) for at, part in zip(starts, own, strict=False)]

    def __call__(self, x: Tensor) -> Tensor:
        own = super().__call__(x)
        whole = self._exchange.place("heads", len(x), self._outputs, own.dtype)
        for columns, part in zip(self._columns, torch.split(own, self._sizes, dim=1), strict=True):
            whole[:, columns] = part
        self._exchange.meet()
        return whole.clone()  # adapters add to it


class GatheringLinear(GatheredLinear):
    """The same of a linear layer of whose input this rank has only the columns from `first_input` on, of `inputs`."""

    def __init__(self, of: GatheredLinear, first_input: int, inputs: int) -> None:
        super().__init__(of, of._exchange, of._first, of._outputs)
        self._first_input, self._inputs = first_input, inputs

    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(self._exchange.gathered("attended", x, self._first_input, self._inputs))


class ShardedExperts(Experts):
    """A mixture of experts of which this rank has each that is its number, counted around."""

    def __init__(self, of: Experts, shard: Shard, exchange: RankExchange) -> None:
        self._config, self.router, self.experts = of._config, of.router, of.experts
        self.shared, self.shared_gate = of.shared, of.shared_gate
        self._shard, self._exchange = shard, exchange

    def _computed(self, x: Tensor, chosen: Tensor) -> Tensor:
        of_pairs, each = chosen.flatten(), chosen.shape[1]
        by_expert, counts = of_pairs.argsort(stable=True), of_pairs.bincount(minlength=len(self.experts))
        whole = self._exchange.place("experts", len(x), each * x.shape[1], x.dtype).view(len(of_pairs), -1)
        ends = [0, *counts.cumsum(0).tolist()]
        for number, (start, end) in enumerate(pairwise(ends)):
            if end > start and self._is_own(number):
                pairs = by_expert[start:end]
                whole[pairs] = self.experts[number](x[pairs // each], unadapted)
        self._exchange.meet()
        return whole.view(*chosen.shape, -1)

    def linears(self) -> tuple[Linear, ...]:
        own = [expert for number, expert in enumerate(self.experts) if self._is_own(number)]
        of_all = self.shared.linears() if self.shared else ()
        return *(part for expert in own for part in expert.linears()), *of_all

    def _is_own(self, number: int) -> bool:
        return number % self._shard.ranks == self._shard.rank


def _moved(rows: range, by: int) -> range:
    return range(rows.start + by, rows.stop + by)


def part_columns(model: ShardedDecoder) -> Mapping[str, slice]:
    """Returns this rank's outputs of each linear layer that an adapter may change, by its name in a checkpoint."""
    dim = model.config.head_dim
    inner = model.shard.outputs(model.config.intermediate_size)
    own = slice(inner.start, inner.stop)
    if model.config.qk_norm_of_all:
        return {"gate_proj": own, "up_proj": own}
    q, kv = (slice(dim * these.start, dim * these.stop) for these in (model.heads, model.kv_heads))
    return {"q_proj": q, "k_proj": kv, "v_proj": kv, "gate_proj": own, "up_proj": own}
