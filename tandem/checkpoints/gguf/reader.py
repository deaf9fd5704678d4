"""Reads a GGUF file's metadata and its tensors' places; no weights.

    magic, version, counts ──> keys, types, values ──> each tensor's name, shape, type, offset ──> aligned: the data

A file may be damaged, or malicious: whatever numbers it contains, no more is read or allocated than its size allows.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAGIC, VERSIONS = b"GGUF", (2, 3)
ALIGNMENT = 32
# Types of values: their letters in `struct`, and the two types without a fixed size.
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
TEXT, ARRAY = 8, 9
MOST_DIMENSIONS = 4
# The least bytes of a key with its value, and of a tensor's entry.
LEAST_OF_KEY, LEAST_OF_TENSOR, LEAST_OF_TEXT = 13, 24, 8
# Far above what the largest vocabularies need.
MOST_BYTES, MOST_VALUES = 2**27, 2**22


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor's entry.

    `shape`: the contiguous dimension first, as in the file; `offset`: from the file's beginning.
    """

    name: str
    type: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def read_gguf(file: Path) -> tuple[dict[str, Any], list[GgufTensor]]:
    """Returns the metadata and the tensors' entries.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is no GGUF file, or is damaged.
    """
    size = file.stat().st_size
    with file.open("rb") as opened:
        if opened.read(len(MAGIC)) != MAGIC:
            raise ValueError("is not a GGUF file")
        with mmap.mmap(opened.fileno(), min(size, MOST_BYTES), access=mmap.ACCESS_READ) as mapped:
            try:
                values, tensors = GgufHeader(mapped).read()
            except ValueError as error:
                raise ValueError(f"is damaged: {error}") from None
    for tensor in tensors:
        if tensor.offset + tensor.nbytes > size:
            raise ValueError(f"is cut short: tensor {tensor.name} ends behind its end")
    return values, tensors


class GgufHeader:
    """Reads a file's header from its beginning. `at`: the position of the next byte."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data, self._at, self._num_values = data, len(MAGIC), 0

    def read(self) -> tuple[dict[str, Any], list[GgufTensor]]:
        version = self._number("I")
        if version not in VERSIONS:
            raise ValueError(f"version {version} is not one of {', '.join(map(str, VERSIONS))}")
        num_tensors, num_keys = self._number("Q"), self._number("Q")
        values: dict[str, Any] = {}
        for _ in range(self._bounded(num_keys, LEAST_OF_KEY)):
            key = self._text()
            if key in values:
                raise ValueError(f"{key} is there twice")
            values[key] = self._value(self._number("I"))
        found = {
            entry[0]: entry for entry in (self._entry() for _ in range(self._bounded(num_tensors, LEAST_OF_TENSOR)))
        }
        if len(found) != num_tensors:
            raise ValueError("two tensors have one name")
        alignment = values.get("general.alignment", ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise ValueError(f"general.alignment {alignment!r} is no power of two")
        begin = self._at + -self._at % alignment
        return values, [_tensor(begin, *entry) for entry in found.values()]

    def _entry(self) -> tuple[str, tuple[int, ...], int, int]:
        """Returns a tensor's name, shape, type and offset from the header's end."""
        name, num_dimensions = self._text(), self._number("I")
        if num_dimensions > MOST_DIMENSIONS:
            raise ValueError(f"tensor {name} has {num_dimensions} dimensions")
        shape = tuple(self._numbers("Q", num_dimensions))
        return name, shape, self._number("I"), self._number("Q")

    def _value(self, kind: int) -> Any:
        if kind == TEXT:
            return self._text()
        if kind != ARRAY:
            return self._number(_letter(kind))
        kind, length = self._number("I"), self._number("Q")
        if kind != TEXT:
            return list(self._numbers(_letter(kind), length))
        return [self._text() for _ in range(self._bounded(length, LEAST_OF_TEXT))]

    def _text(self) -> str:
        return str(self.take(self._number("Q")), "utf-8")

    def _number(self, letter: str) -> Any:
        (found,) = self._numbers(letter, 1)
        return found

    def _numbers(self, letter: str, count: int) -> Sequence[Any]:
        size = struct.calcsize(letter)
        return struct.unpack(f"<{self._bounded(count, size)}{letter}", self.take(count * size))

    def _bounded(self, count: int, least: int) -> int:
        """Returns `count` if that many entries of at least `least` bytes each can follow; else raises ValueError."""
        self._num_values += count
        if count * least > len(self._data) - self._at or self._num_values > MOST_VALUES:
            raise ValueError(f"{count} values cannot follow byte {self._at}")
        return count

    def take(self, count: int) -> bytes:
        """Returns the next `count` bytes.

        Raises:
            ValueError: fewer bytes are left.
        """
        if count > len(self._data) - self._at:
            raise ValueError(f"{count} bytes do not follow byte {self._at}")
        found = self._data[self._at : self._at + count]
        self._at += count
        return found


def _letter(kind: int) -> str:
    if kind not in SCALARS:
        raise ValueError(f"{kind} is no type of a value, or not of one in a list")
    return SCALARS[kind]


def _tensor(begin: int, name: str, shape: tuple[int, ...], kind: int, offset: int) -> GgufTensor:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType  # imported here, as it takes a second

    named = GGMLQuantizationType(kind)
    per_block, block_bytes = GGML_QUANT_SIZES[named]
    count = 1
    for dimension in shape:
        count *= dimension
    if count % per_block or (shape and shape[0] % per_block):
        raise ValueError(f"tensor {name} of {named.name} has rows of {shape[0]}, which are no whole blocks")
    return GgufTensor(name, named.name, shape, begin + offset, count // per_block * block_bytes)
