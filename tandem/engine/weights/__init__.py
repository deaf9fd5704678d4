"""Loading weights from files into a model, and their revision. The engine's build and speculation may enter."""

from tandem.engine.weights.loader import find_weights, load_weights, read_tensors, shard_paths
from tandem.engine.weights.revision import hashing

__all__ = [
    "find_weights",
    "hashing",
    "load_weights",
    "read_tensors",
    "shard_paths",
]
