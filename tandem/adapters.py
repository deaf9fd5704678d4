"""LoRA adapters as all parts of a cluster name them. No torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AdapterRef:
    """The adapter that clients call `name`: what `path`, a PEFT folder of a worker's lora-dir or hf://organisation/
    adapter@commit, held when it was loaded.

    `revision` is a fingerprint of that, and stands in block hashes.
    """

    name: str
    path: str
    revision: str
    model: str = ""  # that it adapts, by name; empty where that was not said
