"""Names of KV blocks: a chained hash, equal in every process for equal contents.

    root  = H(model, revision, lora, salt)
    hash0 = H(root, tokens[0:block_size])
    hash1 = H(hash0, tokens[block_size:2*block_size])   ...

A block's hash therefore stands for its tokens and everything before them. BLAKE2b keeps one tenant from crafting a
prompt that collides with another's.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b

HASH_BYTES = 16
MAX_SALT_LENGTH = 1024  # bounds the tenant's name and the request's salt, as root hashes are cached


@lru_cache(1024)
def root_hash(model: str, revision: str, lora: str = "", salt: str = "") -> bytes:
    """Returns the hash that a chain starts from: blocks are shared only if all four arguments are equal."""
    parts = [part.encode() for part in (model, revision, lora, salt)]
    return blake2b(b"".join(len(p).to_bytes(4, "little") + p for p in parts), digest_size=HASH_BYTES).digest()


def next_hash(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Returns the hash of one full block that follows `parent`."""
    return blake2b(parent + array("I", tokens).tobytes(), digest_size=HASH_BYTES).digest()


def block_hashes(root: bytes, tokens: Sequence[int], block_size: int) -> list[bytes]:
    """Returns the hashes of the full blocks of `tokens`; a partial last block has none."""
    hashes, parent = [], root
    packed = array("I", tokens[:]).tobytes()  # slicing a proto's repeated field is faster than reading its items
    width = 4 * block_size
    for start in range(0, len(tokens) // block_size * width, width):
        parent = blake2b(parent + packed[start : start + width], digest_size=HASH_BYTES).digest()
        hashes.append(parent)
    return hashes
