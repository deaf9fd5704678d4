"""KV as bytes: its number format, its layout's hash for exchange, its swap to host memory. The engine may enter."""

from tandem.engine.kv.kv_cache import opened, write_kv
from tandem.engine.kv.layout import KVLayout, torch_dtype
from tandem.engine.kv.swap import Copies, SwapSpace

__all__ = [
    "Copies",
    "KVLayout",
    "SwapSpace",
    "opened",
    "torch_dtype",
    "write_kv",
]
