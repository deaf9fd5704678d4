"""Token ids of a prompt, once they are known to be in the vocabulary."""

from __future__ import annotations

from array import array


class CheckedIds(array):  # type: ignore[type-arg]
    """Token ids that are in the vocabulary: four bytes each, and nothing that the collector of garbage looks into."""

    @classmethod
    def of(cls, data: bytes) -> CheckedIds:
        made = cls("I")
        made.frombytes(data)
        return made
