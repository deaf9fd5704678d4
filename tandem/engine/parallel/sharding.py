"""The part of a model that each rank computes: heads of attention, and outputs of each linear layer.

A part's first output is a multiple of UNIT. So torch, which computes what is left of a row behind its last whole vector
in another way, computes each output in the same way at any number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from tandem.engine.models import ModelConfig

UNIT = 64


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of rank `rank` of `ranks`."""

    rank: int
    ranks: int

    def outputs(self, size: int) -> range:
        """Returns its outputs of `size`."""
        units = -(-size // UNIT)
        first, end = (min(size, units * rank // self.ranks * UNIT) for rank in (self.rank, self.rank + 1))
        return range(first, end)

    def kv_heads(self, config: ModelConfig) -> range:
        """Returns its KV heads. Several ranks compute the same one where there are more ranks than KV heads."""
        count = config.num_kv_heads
        if self.ranks > count:
            first = self.rank * count // self.ranks
            return range(first, first + 1)
        return range(count * self.rank // self.ranks, count * (self.rank + 1) // self.ranks)

    def heads(self, config: ModelConfig) -> range:
        """Returns its query heads: those of its KV heads, or, of a KV head that several ranks compute, as many each."""
        share = config.num_heads // config.num_kv_heads
        if self.ranks > config.num_kv_heads:
            each = config.num_heads // self.ranks
            return range(each * self.rank, each * (self.rank + 1))
        kv_heads = self.kv_heads(config)
        return range(kv_heads.start * share, kv_heads.stop * share)


def check_split(config: ModelConfig, ranks: int) -> None:
    """Raises ValueError if a model cannot be split among so many ranks; the message names what can."""
    heads, kv_heads = config.num_heads, config.num_kv_heads
    can = [n for n in range(1, heads + 1) if n <= kv_heads or (n % kv_heads == 0 and heads % n == 0)]
    if ranks not in can:
        one_of = ", ".join(map(str, can))
        raise ValueError(
            f"tensor_parallel: {ranks} ranks cannot share {heads} heads over {kv_heads} KV heads: take {one_of}"
        )
