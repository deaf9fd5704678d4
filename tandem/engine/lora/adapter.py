"""One adapter's weights, and what they add to the rows of a step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from torch import Tensor

from tandem.engine.models import linear

# The linear layers of a checkpoint, by the fused one of `Decoder` whose outputs they are a part of, in its order.
PARTS: Mapping[str, tuple[str, ...]] = {
    "qkv": ("q_proj", "k_proj", "v_proj"), "o": ("o_proj",), "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class LowRank:
    """Adds x `down`^T `up`, (rows, outputs): `down` is (rank, inputs), `up` (rank, outputs), scaled already."""

    down: Tensor
    up: Tensor


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Adapter:
    """`layers[i]` has a LowRank for each linear layer that the adapter changes, by its name in a checkpoint."""

    revision: str
    layers: Sequence[Mapping[str, LowRank]]
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        parts = [part for layer in self.layers for part in layer.values()]
        object.__setattr__(self, "nbytes", sum(part.down.nbytes + part.up.nbytes for part in parts))


class RowAdapters:
    """The products that adapters add in one step. `counts[i]` rows, one after the other, are adapted by
    `adapters[i]`, if any.

    `sizes` has the outputs of each part of a fused layer.
    """

    def __init__(
        self, adapters: Sequence[Adapter | None], counts: Sequence[int], sizes: Mapping[str, Sequence[int]]
    ) -> None:
        self._runs, self._sizes = list(runs(adapters, counts)), sizes

    def __call__(self, layer: int, name: str, x: Tensor, out: Tensor) -> None:
        """To `out`, which the linear layer `name` made of `x`."""
        for adapter, begin, end in self._runs:
            first = 0
            for part, size in zip(PARTS[name], self._sizes[name], strict=True):
                if (found := adapter.layers[layer].get(part)) is not None:
                    out[begin:end, first : first + size] += linear(linear(x[begin:end], found.down), found.up.T)
                first += size


def runs(adapters: Iterable[Adapter | None], counts: Iterable[int]) -> Iterable[tuple[Adapter, int, int]]:
    """Neighbouring rows with the same adapter: it, their begin and end."""
    end = 0
    for adapter, members in groupby(zip(adapters, counts, strict=True), key=lambda pair: pair[0]):
        begin, end = end, end + sum(count for _, count in members)
        if adapter is not None:
            yield adapter, begin, end
