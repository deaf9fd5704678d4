"""Keeps what clients ask for, in a Redis of its own that may forget. The gateway may enter."""

from tandem.store.store import Store, StoreUnavailable

__all__ = ["Store", "StoreUnavailable"]
