"""References to LoRA adapters, the same in all parts of a cluster. No torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AdapterRef:
    """A loaded adapter, under the `name` that clients use. `path`: a PEFT folder in the workers' lora-dir, or
    hf://organisation/adapter@commit.

    `revision`: a fingerprint of the folder's content when it was loaded, which is part of block hashes.
    """

    name: str
    path: str
    revision: str
    model: str = ""  # the name of the model that it adapts; empty: unknown
