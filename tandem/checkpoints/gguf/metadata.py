"""Access to a GGUF file's metadata by key and type: an error names the file and the key."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar, get_origin

T = TypeVar("T", str, int, float, bool, list[Any])


class Metadata:
    """A GGUF file's metadata: `values` by key, and the names of its `tensors`."""

    def __init__(self, file: Path, values: Mapping[str, Any], tensors: frozenset[str]) -> None:
        self.file = file
        self.tensors = tensors
        self._values = values

    def get(self, key: str, kind: type[T]) -> T | None:
        """Returns the value of a key; None if it is missing.

        Raises:
            ValueError: the value has another type.
        """
        value = self._values.get(key)
        if value is None:
            return None
        if kind is float and isinstance(value, int):
            value = float(value)
        if not isinstance(value, get_origin(kind) or kind) or (kind is int and isinstance(value, bool)):
            raise ValueError(f"{self.file}: {key} must be of type {kind.__name__}, got {str(value)[:80]!r}")
        return value

    def need(self, key: str, kind: type[T]) -> T:
        """Returns the value of a key.

        Raises:
            ValueError: the value is missing, or has another type.
        """
        value = self.get(key, kind)
        if value is None:
            raise ValueError(f"{self.file}: {key} is missing")
        return value
