"""An adapter's weights, and the products that adapters add to the rows of a step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from torch import Tensor

from tandem.engine.models import linear

# The linear layers of a checkpoint, by the fused layer of `Decoder` that they form, in the order of its outputs.
PARTS: Mapping[str, tuple[str, ...]] = {
    "qkv": ("q_proj", "k_proj", "v_proj"), "o": ("o_proj",), "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class LowRank:
    """The factors of a product x `down`^T `up` (rows, outputs): `down` (rank, inputs), scaled `up` (rank, outputs)."""

    down: Tensor
    up: Tensor


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Adapter:
    """An adapter: `layers[i]` has, by its name in a checkpoint, a LowRank for each linear layer that it changes."""

    revision: str
    layers: Sequence[Mapping[str, LowRank]]
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        parts = [part for layer in self.layers for part in layer.values()]
        object.__setattr__(self, "nbytes", sum(part.down.nbytes + part.up.nbytes for part in parts))


class RowAdapters:
    """The products that adapters add in one step. `adapters[i]`, if not None, adapts the next `counts[i]` rows.

    `sizes` has the number of outputs of each part of a fused layer, `columns` those that the layers here have of a
    part, if not all.
    """

    def __init__(
        self, adapters: Sequence[Adapter | None], counts: Sequence[int], sizes: Mapping[str, Sequence[int]],
        columns: Mapping[str, slice],
    ) -> None:  # fmt: skip
        self._runs, self._sizes, self._columns = list(runs(adapters, counts)), sizes, columns

    def __call__(self, layer: int, name: str, x: Tensor, out: Tensor) -> None:
        """Adds the adapters' products to `out`, the output of the linear layer `name` for the input `x`."""
        for adapter, begin, end in self._runs:
            first = 0
            for part, size in zip(PARTS[name], self._sizes[name], strict=True):
                own = self._columns.get(part, slice(0, size))
                size = own.stop - own.start
                if (found := adapter.layers[layer].get(part)) is not None:
                    out[begin:end, first : first + size] += linear(linear(x[begin:end], found.down), found.up.T[own])
                first += size


def runs(adapters: Iterable[Adapter | None], counts: Iterable[int]) -> Iterable[tuple[Adapter, int, int]]:
    """Yields (adapter, begin, end) for each run of neighbouring rows with the same adapter, not for rows without."""
    end = 0
    for adapter, members in groupby(zip(adapters, counts, strict=True), key=lambda pair: pair[0]):
        begin, end = end, end + sum(count for _, count in members)
        if adapter is not None:
            yield adapter, begin, end
