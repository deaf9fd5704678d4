"""A library's kernels for one kind of GPU alone: those for others become zeros, which compress to nothing.

    fat binary    header: magic, version, its own size, size of what follows; then entries
    entry         header: kind, …, its own size, size of its code, …, compute capability at byte 28; then code

A driver takes machine code of its GPU's own major capability, up to its minor one, or else compiles PTX of the newest
one up to it: of each fat binary just that stays. The layout is NVIDIA's, undocumented; what does not look like it is
left as it is.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

MAGIC = struct.pack("<IH", 0xBA55ED50, 1)
BINARY, ENTRY = struct.Struct("<IHHQ"), struct.Struct("<HHIQ")
CAPABILITY = struct.Struct("<28xI")
PTX, MACHINE = 1, 2


class Code(NamedTuple):
    kind: int
    capability: int  # 90 for 9.0, and for 9.0a
    start: int
    size: int


def only_for(capability: int, library: bytearray) -> int:
    """Zeroes what a GPU of the capability does not need, in place; returns the number of bytes."""
    zeroed = 0
    for codes in fat_binaries(library):
        for code in set(codes) - _needed(capability, codes):
            library[code.start : code.start + code.size] = bytes(code.size)
            zeroed += code.size
    return zeroed


def _needed(capability: int, codes: list[Code]) -> set[Code]:
    older = {code for code in codes if code.capability <= capability}
    own = {code for code in older if code.kind == MACHINE and code.capability // 10 == capability // 10}
    ptx = {code for code in older if code.kind == PTX}
    newest = max((code.capability for code in ptx), default=0)
    return own or {code for code in ptx if code.capability == newest}


def fat_binaries(library: bytearray) -> Iterator[list[Code]]:
    """Yields what is in each of them; nothing where the sizes do not add up."""
    at = library.find(MAGIC)
    while 0 <= at <= len(library) - BINARY.size:
        _, _, header, size = BINARY.unpack_from(library, at)
        yield _codes(library, at + header, at + header + size) if at + header + size <= len(library) else []
        at = library.find(MAGIC, at + len(MAGIC))


def _codes(library: bytearray, at: int, end: int) -> list[Code]:
    found = []
    while at + CAPABILITY.size <= end:
        kind, _, header, size = ENTRY.unpack_from(library, at)
        (capability,) = CAPABILITY.unpack_from(library, at)
        found.append(Code(kind, capability, at + header, size))
        at += max(header, CAPABILITY.size) + size
    return found if at == end else []
