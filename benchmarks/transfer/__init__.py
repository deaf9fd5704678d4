"""Measures KV transfer: run with `python -m benchmarks.transfer`. benchmarks.gpu may enter."""

from benchmarks.transfer.bandwidth import ORDERS, bandwidth

__all__ = ["ORDERS", "bandwidth"]
