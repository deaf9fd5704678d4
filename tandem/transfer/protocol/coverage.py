"""The (layer, logical block) pairs of one transfer that have been sent or have arrived; each side keeps a Coverage."""

from __future__ import annotations

from tandem.transfer.protocol.endpoint import ALL_FAR, NearLayers


class Coverage:
    def __init__(self, first_block: int, num_blocks: int, num_layers: int, near: NearLayers = ALL_FAR) -> None:
        self.first_block, self.num_blocks, self.num_layers = first_block, num_blocks, num_layers
        self._near, end = near, first_block + num_blocks
        self._num_all = sum(end - near.first(layer, first_block, end) for layer in range(num_layers))
        self.missing = self._num_all
        self._seen = bytearray(num_blocks * num_layers)

    @property
    def num_seen(self) -> int:
        return self._num_all - self.missing

    def fault(self, layer: int, first_block: int, num_blocks: int) -> str:
        """Returns why these blocks are out of range or have come already; empty if they may come."""
        end = self.first_block + self.num_blocks
        if not 0 <= layer < self.num_layers:
            return f"layer {layer} is outside [0, {self.num_layers})"
        first = self._near.first(layer, self.first_block, end)
        if num_blocks < 1 or first_block < first or first_block + num_blocks > end:
            return f"blocks [{first_block}, {first_block + num_blocks}) are outside [{first}, {end})"
        if self._seen.find(1, *self._span(layer, first_block, num_blocks)) >= 0:
            return f"layer {layer}, blocks [{first_block}, {first_block + num_blocks}) came twice"
        return ""

    def add(self, layer: int, first_block: int, num_blocks: int) -> None:
        """Marks blocks as having come. The caller must have checked that `fault` is empty."""
        start, stop = self._span(layer, first_block, num_blocks)
        self._seen[start:stop] = b"\1" * num_blocks
        self.missing -= num_blocks

    def _span(self, layer: int, first_block: int, num_blocks: int) -> tuple[int, int]:
        start = layer * self.num_blocks + first_block - self.first_block
        return start, start + num_blocks
