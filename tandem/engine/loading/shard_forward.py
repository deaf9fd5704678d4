"""The C kernels as the forward pass of a rank: each of its linear layers writes its own columns where all ranks read.

    tokens ─ embed ─> x ─┬─ norm, qkv, rope, attend ─> attended ─ o, +x ─> x ─┬─ norm, gate-up ─> inner ─ down, +x ─> x
                         meet                          meet               meet                    meet            meet

`x` lies in the place "hidden": nothing is copied or added twice, and each number is rounded as a single rank rounds it.
Where norms follow linear layers, each rank has an `x` of its own, and adds the norm of what lies in "hidden".
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from tandem.engine.forward import Taps
from tandem.engine.kernels import PANEL_OUTPUTS, TILE_ROWS, Columns, CpuForward, RanksStruct, private_room
from tandem.engine.models import ModelConfig
from tandem.engine.parallel import Shard, ShardedDecoder, part_columns


class ShardForward(CpuForward):
    """Runs `model` over this rank's heads of the KV cache. All ranks call it with the same step, and get the same."""

    def __init__(
        self, library: ctypes.CDLL, model: ShardedDecoder, kv_cache: list[Tensor], max_tokens: int, threads: int,
        taps: Taps | None = None, least_work: int = 1,
    ) -> None:  # fmt: skip
        self._exchange, self._shard, config, shard = model.exchange, model.shard, model.config, model.shard
        self._has_own_x = config.norm_names[1] != ""
        self._tokens = shard.outputs(config.vocab_size)
        super().__init__(library, model, kv_cache, max_tokens, lambda: threads, taps, least_work)
        self._ranks = RanksStruct(*model.exchange.native())
        hidden, inner = shard.outputs(config.hidden_size), shard.outputs(config.intermediate_size)
        dim = config.head_dim
        self._struct.ranks = ctypes.addressof(self._ranks)
        self._struct.attended = Columns(dim * model.heads.start, dim * config.num_heads)
        self._struct.outputs = Columns(hidden.start, config.hidden_size)
        self._struct.inner = Columns(inner.start, config.intermediate_size)
        self._struct.vocabulary = Columns(self._tokens.start, config.vocab_size)
        of_hidden = slice(hidden.start, hidden.stop)
        self._columns = {**part_columns(model), "o_proj": of_hidden, "down_proj": of_hidden}

    @staticmethod
    def misfit_among(config: ModelConfig, ranks: int) -> str:
        """Returns why the kernels cannot compute such a model's shards; empty if they can."""
        if config.experts is not None:
            return "they do not share experts among ranks"
        if config.qk_norm_of_all:
            return "they do not norm all heads together among ranks"
        shards = [Shard(rank, ranks) for rank in range(ranks)]
        for shard in shards:
            sizes = [len(shard.outputs(size)) for size in (config.hidden_size, config.vocab_size)]
            if not all(sizes) or any(size % PANEL_OUTPUTS for size in sizes):
                return f"shares of the model's sizes are no multiples of {PANEL_OUTPUTS}"
        return next(filter(None, (CpuForward.misfit(own_config(config, shard)) for shard in shards)), "")

    def logits(self, hidden: Tensor, rows: Sequence[int]) -> Tensor:
        out = self._exchange.place("logits", len(rows), self._model.config.vocab_size, torch.float32)
        self._put_logits(hidden, rows, out)
        self._exchange.meet()
        return self._model.bounded(out)

    def _own_config(self) -> ModelConfig:
        return own_config(self._model.config, self._shard)

    def _adapted_columns(self) -> Mapping[str, slice]:
        return self._columns

    def _make_room(self, config: ModelConfig, max_tokens: int) -> list[Tensor]:
        whole, like = self._model.config, self._model.norm
        widths = {
            "hidden": whole.hidden_size, "attended": whole.num_heads * whole.head_dim, "inner": whole.intermediate_size,
        }  # fmt: skip
        places = (self._exchange.place(name, max_tokens, width, like.dtype) for name, width in widths.items())
        self._hidden, attended, inner = places
        x, normed, qkv, _, _ = private_room(config, max_tokens, like)
        ordered = like.new_empty(max_tokens + TILE_ROWS - 1, max(widths.values()))
        return [x if self._has_own_x else self._hidden, normed, qkv, attended, inner, self._hidden, ordered]

    def _put_embedded(self, ids: Tensor) -> None:
        tokens, rows, whole = self._tokens, len(ids), self._hidden
        own = ids - tokens.start
        self._unpack(own, whole)
        if scale := self._model.embed_scale:
            which = ((own >= 0) & (own < len(tokens))).nonzero()[:, 0]
            whole[which] = whole[which] * scale
        self._exchange.meet()
        if self._has_own_x:
            self._room[0][:rows] = whole[:rows]

    def _fail(self) -> None:
        self._exchange.fail()


def own_config(config: ModelConfig, shard: Shard) -> ModelConfig:
    """Returns the config with the numbers of heads, inner outputs and tokens that a rank has."""
    return replace(
        config, num_heads=len(shard.heads(config)), num_kv_heads=len(shard.kv_heads(config)),
        intermediate_size=len(shard.outputs(config.intermediate_size)),
        vocab_size=len(shard.outputs(config.vocab_size)),
    )  # fmt: skip
