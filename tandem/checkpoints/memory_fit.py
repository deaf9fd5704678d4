"""Says if a model fits a machine: weights, KV and what a worker takes besides, beside the memory that there is.

The same arithmetic before a model is fetched, in `tandem doctor --fit`, and in a worker before it loads its weights; it
is logged there. Where KV is what a GPU's share leaves, the worker logs it afterwards, with what it has measured.
"""

from __future__ import annotations

from dataclasses import dataclass

# Python, torch, buffers for a step: measured on a worker with the demo model, less its weights and KV.
WORKER_OVERHEAD = 400 * 2**20
# Of bfloat16's bytes, what weights take that are quantized when they are loaded.
SHARES = {"none": 1.0, "int8": 0.55, "int4": 0.35, "fp8": 0.55}
GIB = 2**30


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Bytes of one worker."""

    weights: int
    kv: int
    overhead: int = WORKER_OVERHEAD

    @property
    def total(self) -> int:
        return self.weights + self.kv + self.overhead


def held_weights(weights: int, dtype: str, quantization: str) -> int:
    """Memory of a checkpoint of so many bytes in a worker."""
    return int(weights * {"float32": 2.0}.get(dtype, 1.0) * SHARES.get(quantization, 1.0))


def misfit(needs: list[MemoryNeed], available: int) -> str:
    """Why workers with these needs do not fit into so many bytes, or ""."""
    if sum(need.total for need in needs) <= available:
        return ""
    return f"does not fit: {described(needs, available)}"


def described(needs: list[MemoryNeed], available: int) -> str:
    """The sum, by its parts."""
    total = sum(need.total for need in needs)
    each = "; ".join(
        f"weights {need.weights / GIB:.1f} + KV {need.kv / GIB:.1f} + overhead {need.overhead / GIB:.1f} GiB"
        for need in dict.fromkeys(needs)
    )
    who = "1 worker" if len(needs) == 1 else f"{len(needs)} workers"
    return f"{who} ({each}) need{'s' * (len(needs) == 1)} {total / GIB:.1f} GiB of {available / GIB:.1f} GiB"
