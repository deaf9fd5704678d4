"""A model in memory, whole or among ranks, and the KV cache of its steps. The engine's build may enter."""

from tandem.engine.loading.lead import Led, lead
from tandem.engine.loading.loaded import LEAST_WORK, Loaded, load, new_kv_cache

__all__ = ["LEAST_WORK", "Led", "Loaded", "lead", "load", "new_kv_cache"]
