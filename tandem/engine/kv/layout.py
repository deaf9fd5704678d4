"""The shape and meaning of KV bytes: two engines may exchange blocks only when their layout hashes are equal."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b

import torch

from tandem.engine.kv.kv_cache import row_size
from tandem.engine.scheduling import Windows


@dataclass(frozen=True)
class KVLayout:
    """The shape of KV: a layer's cache is (num_blocks, 2, num_kv_heads, block_size, row); index 0 is K, 1 is V.

    `dtype`: the dtype in which the model computes, and of KV unless `kv_cache_dtype` is int8: see kv_cache.py. Layers
    of `windows` hold only their windows.
    """

    model: str
    revision: str
    dtype: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    tp: int = 1
    kv_cache_dtype: str = "auto"
    windows: Windows | None = None

    @cached_property
    def hash(self) -> str:
        """Returns a hash of all fields, 32 hex digits."""
        fields = dataclasses.asdict(self)
        del fields["windows"]
        if self.windows is not None:
            fields["windows"] = self.windows.seen, sorted(self.windows.layers)
        return blake2b(json.dumps(fields, sort_keys=True).encode(), digest_size=16).hexdigest()

    @property
    def kv_dtype(self) -> torch.dtype:
        return torch.int8 if self.kv_cache_dtype == "int8" else torch_dtype(self.dtype)

    @property
    def block_bytes(self) -> int:
        """The bytes of one block in one layer, K and V together."""
        return math.prod(self.block_shape(1)) * self.kv_dtype.itemsize

    @property
    def whole_block_bytes(self) -> int:
        """The bytes of one block in all layers."""
        return self.block_bytes * self.num_layers

    def layer_blocks(self, layer: int, num_blocks: int) -> int:
        """Returns the number of blocks of a layer's cache in an engine of `num_blocks`."""
        windows = self.windows
        return windows.count(num_blocks) if windows is not None and layer in windows.layers else num_blocks

    def cache_bytes(self, num_blocks: int) -> int:
        """Returns the bytes of all layers' caches in an engine of `num_blocks`."""
        return self.block_bytes * sum(self.layer_blocks(layer, num_blocks) for layer in range(self.num_layers))

    def moved_bytes(self, num_blocks: int) -> int:
        """Returns the bytes of a transfer of `num_blocks` blocks of a sequence."""
        near = self.windows.layers if self.windows is not None else frozenset()
        moved = min(num_blocks, self.windows.moved) if self.windows is not None else 0
        return self.block_bytes * (num_blocks * (self.num_layers - len(near)) + moved * len(near))

    def block_shape(self, num_blocks: int) -> tuple[int, int, int, int, int]:
        """Returns the shape of one layer's cache of `num_blocks` blocks."""
        return num_blocks, 2, self.num_kv_heads, self.block_size, row_size(self.kv_dtype, self.head_dim)


def torch_dtype(name: str) -> torch.dtype:
    """Returns the torch dtype called `name`. Raises ValueError for a dtype in which the engine does not compute."""
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name not in dtypes:
        raise ValueError(f"dtype: {name!r} is not one of {', '.join(dtypes)}, auto")
    return dtypes[name]
