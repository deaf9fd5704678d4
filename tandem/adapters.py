"""LoRA adapters as all parts of a cluster name them. No torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AdapterRef:
    """The adapter that clients call `name`: what the PEFT folder `path` of a worker's lora-dir held when it was loaded.

    `revision` is a fingerprint of that, and stands in block hashes.
    """

    name: str
    path: str
    revision: str
