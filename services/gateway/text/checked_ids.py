"""Token ids of a prompt that are known to be in the vocabulary."""

from __future__ import annotations

from array import array


class CheckedIds(array):  # type: ignore[type-arg]
    """Token ids in the vocabulary, four bytes each, which the garbage collector does not traverse."""

    @classmethod
    def of(cls, data: bytes) -> CheckedIds:
        made = cls("I")
        made.frombytes(data)
        return made
