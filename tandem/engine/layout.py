"""The shape and meaning of KV bytes: two engines may exchange blocks only when their layout hashes are equal."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b

import torch


@dataclass(frozen=True)
class KVLayout:
    """A layer's cache is (num_blocks, 2, num_kv_heads, block_size, head_dim) of `dtype`; index 0 is K, 1 is V."""

    model: str
    revision: str
    dtype: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    tp: int = 1

    @cached_property
    def hash(self) -> str:
        """32 hex digits over every field."""
        fields = json.dumps(dataclasses.asdict(self), sort_keys=True)
        return blake2b(fields.encode(), digest_size=16).hexdigest()

    @property
    def torch_dtype(self) -> torch.dtype:
        return torch_dtype(self.dtype)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in one layer, K and V."""
        return 2 * self.num_kv_heads * self.block_size * self.head_dim * self.torch_dtype.itemsize

    def block_shape(self, num_blocks: int) -> tuple[int, int, int, int, int]:
        """Shape of one layer's cache of `num_blocks` blocks."""
        return num_blocks, 2, self.num_kv_heads, self.block_size, self.head_dim


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype called `name`; ValueError for one the engine does not compute in."""
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name not in dtypes:
        raise ValueError(f"dtype: {name!r} is not one of {', '.join(dtypes)}, auto")
    return dtypes[name]
