"""A KV cache as rows of bytes: a layer's cache is (num_blocks, ...), and a row is all bytes of one block."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from tandem.transfer.protocol.endpoint import ALL_FAR, NearLayers

LINE = 64  # bytes of a cache line


class Rows:
    """A contiguous tensor `kv` (num_blocks, ...) as `count` rows of `row_bytes` bytes at `address`.

    on_host: the rows lie in this machine's memory. in_lines: they do, and each row consists of whole cache lines.
    """

    __slots__ = ("address", "count", "in_lines", "kv", "on_host", "row_bytes")

    def __init__(self, kv: torch.Tensor, name: str = "kv") -> None:
        if kv.dim() < 2 or not kv.is_contiguous():
            raise ValueError(f"{name}: need a contiguous tensor (num_blocks, ...), got {tuple(kv.shape)}")
        self.kv = kv
        self.count, self.row_bytes = len(kv), kv.stride(0) * kv.element_size()
        self.address = kv.data_ptr()
        self.on_host = kv.is_cpu
        self.in_lines = self.on_host and self.address % LINE == 0 and self.row_bytes % LINE == 0

    def array(self) -> NDArray[np.uint8]:
        """Views rows on the CPU as (count, row_bytes) bytes."""
        rows: NDArray[np.uint8] = self.kv.view(torch.uint8).numpy().reshape(self.count, self.row_bytes)
        return rows

    def words(self) -> torch.Tensor:
        """Views the rows, on any device, as (count, row_bytes / 8) int64 words."""
        return self.kv.view(self.count, -1).view(torch.int64)


class Source:
    """A cache of rows and ids to send: a chunk's layers share the ids of blocks, and all chunks share the caches."""

    def __init__(self) -> None:
        self._rows: dict[int, Rows] = {}
        self._ids: tuple[int, list[int], NDArray[np.int64]] = 0, [], np.empty(0, np.int64)

    def rows(self, layer: int, kv: torch.Tensor) -> Rows:
        rows = self._rows.get(layer)
        if rows is None or rows.kv is not kv:
            rows = self._rows[layer] = Rows(kv)
        return rows

    def ids(self, block_ids: Sequence[int], num_blocks: int) -> NDArray[np.int64]:
        """Returns block ids as an array. Raises IndexError if an id is not below `num_blocks`."""
        if self._ids[1] != block_ids or self._ids[0] != num_blocks:
            if block_ids and not 0 <= min(block_ids) <= max(block_ids) < num_blocks:
                raise IndexError(f"block_ids: {list(block_ids)} are not all in [0, {num_blocks})")
            self._ids = num_blocks, list(block_ids), np.array(block_ids, dtype=np.int64)
        return self._ids[2]


class KVCache:
    """The receiver's cache, one (num_blocks, ...) tensor a layer, all of one block size, and all of one count but for
    those of `near` layers, which have a count of their own."""

    def __init__(self, layers: Sequence[torch.Tensor], near: NearLayers = ALL_FAR) -> None:
        rows = [Rows(kv, f"kv_cache[{layer}]") for layer, kv in enumerate(layers)]
        shapes = {(layer in near.layers, one.count, one.row_bytes) for layer, one in enumerate(rows)}
        counts = {is_near: count for is_near, count, _ in shapes}
        if not rows or len(shapes) > len(counts) or len({row_bytes for _, _, row_bytes in shapes}) > 1:
            have = [(layer.count, layer.row_bytes) for layer in rows]
            raise ValueError(f"kv_cache: need one or more layers of equal shape, got (blocks, bytes) {have}")
        self.layers, self._near, self._num_places = rows, near, counts.get(True, 0)
        self.num_blocks, self.block_bytes = counts.get(False, 1 << 40), rows[0].row_bytes
        self.num_layers = len(rows)

    def ids(self, block_ids: Sequence[int], first_block: int) -> NDArray[np.int64]:
        """Returns physical ids as an array.

        Raises ValueError unless ids from first_block on are distinct blocks here.
        """
        ids = np.asarray(block_ids, dtype=np.int64).reshape(-1)
        if not 0 <= first_block <= len(ids):
            raise ValueError(f"first_block: {first_block} is outside [0, {len(ids)}]")
        written = ids[first_block:].tolist()
        if written and not (len(set(written)) == len(written) and 0 <= min(written) <= max(written) < self.num_blocks):
            raise ValueError(f"block_ids: must be distinct and in [0, {self.num_blocks}), got {written}")
        return ids

    def places(self, places: Sequence[int], first_block: int, num_blocks: int) -> NDArray[np.int64]:
        """Returns places of layers with a window as an array.

        Raises ValueError unless there is one for each block, and those that a transfer writes to are distinct.
        """
        ids, moved = np.asarray(places, dtype=np.int64).reshape(-1), self._near.moved
        if len(ids) != (num_blocks if self._near.layers else 0):
            raise ValueError(f"places: {len(ids)} for {num_blocks} blocks and {len(self._near.layers)} layers")
        written = ids[self._near.first(min(self._near.layers, default=0), first_block, len(ids)) :].tolist()
        if written and not (len(set(written)) == len(written) <= moved and 0 < min(written) <= max(written)):
            raise ValueError(f"places: must be distinct, at most {moved} and above 0, got {written}")
        if max(ids, default=0) >= max(1, self._num_places):
            raise ValueError(f"places: {ids.tolist()} are not all below {self._num_places}")
        return ids
