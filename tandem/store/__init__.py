"""Keeps data for clients in a Redis of its own that may evict it. The gateway may enter."""

from tandem.store.store import Store, StoreUnavailable

__all__ = ["Store", "StoreUnavailable"]
