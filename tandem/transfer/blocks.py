"""Rows of bytes behind a KV cache: a layer's cache is (num_blocks, ...), and a row is all of one block."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray


def block_rows(kv: torch.Tensor, name: str = "kv") -> NDArray[np.uint8]:
    """`kv` (num_blocks, ...), contiguous, on the CPU -> the same memory as (num_blocks, block_bytes)."""
    if not kv.is_cpu or kv.dim() < 2 or not kv.is_contiguous():
        raise ValueError(
            f"{name}: need a contiguous CPU tensor (num_blocks, ...), got {tuple(kv.shape)} on {kv.device}"
        )
    rows: NDArray[np.uint8] = kv.view(torch.uint8).numpy().reshape(len(kv), -1)
    return rows


def row_ids(block_ids: Sequence[int], num_blocks: int) -> NDArray[np.int64]:
    """Raises IndexError where a block is not one of `num_blocks`."""
    if block_ids and not 0 <= min(block_ids) <= max(block_ids) < num_blocks:
        raise IndexError(f"block_ids: {list(block_ids)} are not all in [0, {num_blocks})")
    return np.array(block_ids, dtype=np.int64)


def gather(rows: NDArray[np.uint8], ids: NDArray[np.int64], out: memoryview) -> None:
    """Copies rows `ids`, which must exist, to `out` in one call that does not hold the GIL."""
    target = np.frombuffer(out, np.uint8).reshape(len(ids), -1)
    rows.take(ids, axis=0, out=target, mode="clip")  # "raise" would copy everything twice


class KVCache:
    """The receiver's cache, one (num_blocks, ...) tensor a layer, all of one block size and count."""

    def __init__(self, layers: Sequence[torch.Tensor]) -> None:
        rows = [block_rows(kv, f"kv_cache[{layer}]") for layer, kv in enumerate(layers)]
        if not rows or any(layer.shape != rows[0].shape for layer in rows):
            raise ValueError(f"kv_cache: need one or more layers of equal shape, got {[r.shape for r in rows]}")
        self._rows: list[NDArray[np.uint8]] = rows
        self.num_blocks, self.block_bytes = rows[0].shape
        self.num_layers = len(rows)

    def ids(self, block_ids: Sequence[int], first_block: int) -> NDArray[np.int64]:
        """Physical ids as an array; those from first_block on must be distinct blocks of this cache."""
        ids = np.asarray(block_ids, dtype=np.int64).reshape(-1)
        if not 0 <= first_block <= len(ids):
            raise ValueError(f"first_block: {first_block} is outside [0, {len(ids)}]")
        written = ids[first_block:]
        if len(np.unique(written)) != len(written) or np.any((written < 0) | (written >= self.num_blocks)):
            raise ValueError(f"block_ids: must be distinct and in [0, {self.num_blocks}), got {written.tolist()}")
        return ids

    def write(self, layer: int, block_ids: NDArray[np.int64], payload: memoryview) -> None:
        """Scatters `payload`, len(block_ids) blocks, in one call that does not hold the GIL."""
        self._rows[layer][block_ids] = np.frombuffer(payload, np.uint8).reshape(len(block_ids), self.block_bytes)
