"""Checks whether a model fits a machine: compares weights, KV and a worker's overhead with the available memory.

The same calculation is used before a model is fetched, in `tandem doctor --fit`, and in a worker before it loads
weights, which logs it. If KV takes the rest of a GPU's share, the worker logs measured numbers afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass

# Bytes of Python, torch and a step's buffers: measured on a worker with the demo model, less its weights and KV.
WORKER_OVERHEAD = 400 * 2**20
# The size of weights that are quantized at load time, relative to bfloat16.
SHARES = {"none": 1.0, "int8": 0.55, "int4": 0.35, "fp8": 0.55}
GIB = 2**30


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """The bytes that one worker needs."""

    weights: int
    kv: int
    overhead: int = WORKER_OVERHEAD

    @classmethod
    def of(cls, weights: int, kv: int, ranks: int) -> MemoryNeed:
        """Returns the need of a worker of so many processes, which share weights and KV."""
        return cls(weights, kv, ranks * WORKER_OVERHEAD)

    @property
    def total(self) -> int:
        return self.weights + self.kv + self.overhead


def held_weights(weights: int, dtype: str, quantization: str) -> int:
    """Returns the bytes that a checkpoint of `weights` bytes takes in a worker."""
    return int(weights * {"float32": 2.0}.get(dtype, 1.0) * SHARES.get(quantization, 1.0))


def misfit(needs: list[MemoryNeed], available: int) -> str:
    """Returns why workers with these needs do not fit into `available` bytes, or ""."""
    if sum(need.total for need in needs) <= available:
        return ""
    return f"does not fit: {described(needs, available)}"


def described(needs: list[MemoryNeed], available: int) -> str:
    """Describes the needed memory by its parts."""
    total = sum(need.total for need in needs)
    each = "; ".join(
        f"weights {need.weights / GIB:.1f} + KV {need.kv / GIB:.1f} + overhead {need.overhead / GIB:.1f} GiB"
        for need in dict.fromkeys(needs)
    )
    who = "1 worker" if len(needs) == 1 else f"{len(needs)} workers"
    return f"{who} ({each}) need{'s' * (len(needs) == 1)} {total / GIB:.1f} GiB of {available / GIB:.1f} GiB"
