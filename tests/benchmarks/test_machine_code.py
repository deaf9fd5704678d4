"""A library keeps the kernels of one GPU, at their places; the rest, and only that, becomes zeros."""

from __future__ import annotations

import random

import pytest

from benchmarks.gpu.machine_code import BINARY, CAPABILITY, ENTRY, MACHINE, PTX, Code, fat_binaries, only_for

HEADER = 64  # of an entry, as compilers write it


def fat_binary(codes: list[tuple[int, int, bytes]]) -> bytes:
    body = b""
    for kind, capability, code in codes:
        head = bytearray(ENTRY.pack(kind, 0x101, HEADER, len(code)).ljust(HEADER, b"\0"))
        head[CAPABILITY.size - 4 : CAPABILITY.size] = capability.to_bytes(4, "little")
        body += head + code
    return BINARY.pack(0xBA55ED50, 1, BINARY.size, len(body)) + body


def library(*binaries: bytes) -> bytearray:
    return bytearray(b"\x7fELF text" + b"between".join(binaries) + b"data")


def kept(capability: int, codes: list[tuple[int, int, bytes]]) -> list[bool]:
    made = library(fat_binary(codes))
    before, (found,) = bytes(made), fat_binaries(made)
    zeroed = only_for(capability, made)
    stays = [any(made[code.start : code.start + code.size]) for code in found]
    assert zeroed == sum(code.size for code, stay in zip(found, stays, strict=True) if not stay)
    for code in found:
        made[code.start : code.start + code.size] = before[code.start : code.start + code.size]
    assert made == before, "nothing but code was touched"
    return stays


@pytest.mark.parametrize(
    ("capability", "codes", "stays"),
    [
        (90, [(MACHINE, 80), (MACHINE, 90), (MACHINE, 90), (PTX, 90), (MACHINE, 100)], "01100"),
        (90, [(MACHINE, 80), (PTX, 75), (PTX, 80), (PTX, 100)], "0010"),
        (90, [(MACHINE, 80), (PTX, 120)], "00"),
        (86, [(MACHINE, 75), (MACHINE, 80), (MACHINE, 89), (PTX, 80)], "0100"),
        (90, [], ""),
    ],
)
def test_a_gpu_keeps_its_own_code_or_else_the_newest_it_can_compile(
    capability: int, codes: list[tuple[int, int]], stays: str
) -> None:
    dice = random.Random(1)
    assert kept(capability, [(*code, dice.randbytes(40)) for code in codes]) == [sign == "1" for sign in stays]


def test_each_fat_binary_counts_alone() -> None:
    made = library(fat_binary([(MACHINE, 80, b"a" * 9)]), fat_binary([(MACHINE, 90, b"b" * 9), (PTX, 90, b"c")]))
    assert [[code.capability for code in codes] for codes in fat_binaries(made)] == [[80], [90, 90]]
    assert only_for(90, made) == 10
    assert bytes(9) in made
    assert b"b" * 9 in made


def test_what_is_none_stays() -> None:
    """Damage is never followed past the end, nor forever."""
    whole, dice = library(fat_binary([(MACHINE, 80, b"x" * 50), (MACHINE, 90, b"y" * 50)])), random.Random(2)
    for length in range(len(whole)):
        assert only_for(90, whole[:length]) == (50 if length >= len(whole) - len("data") else 0)
    for _ in range(2000):
        damaged = bytearray(whole)
        for place in dice.sample(range(10, 60), 3):
            damaged[place] = dice.randrange(256)
        assert len(damaged) == len(whole)
        only_for(90, damaged)
        assert all(isinstance(code, Code) for codes in fat_binaries(damaged) for code in codes)
