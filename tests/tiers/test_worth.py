"""The block of a full tier that goes first."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.tiers import HostBlocks, Worth
from tandem.tiers.worth import BONUS, MOST_USES

pytestmark = pytest.mark.fast


def name_of(number: int) -> bytes:
    return number.to_bytes(4, "big")


def used(worth: Worth, *numbers: int) -> list[bytes]:
    """Use these; returns what had to go."""
    gone = []
    for number in numbers:
        if worth.is_full and name_of(number) not in worth:
            gone.append(worth.pop())
        worth.use(name_of(number))
    return gone


def test_what_many_prompts_begin_with_survives_prompts_that_never_come_again() -> None:
    worth, head = Worth(100), range(5)
    used(worth, *(number for _ in range(MOST_USES + 1) for number in head))
    used(worth, *range(1000, 1300))
    assert all(name_of(number) in worth for number in head)
    assert len(worth) == 100


def test_what_was_only_popular_goes_in_the_end() -> None:
    worth = Worth(100)
    used(worth, *([0] * 1000))
    used(worth, *range(1000, 1000 + int(100 * (BONUS * MOST_USES + 1)) + 1))
    assert name_of(0) not in worth


def test_of_blocks_used_once_the_oldest_goes() -> None:
    assert used(Worth(3), 1, 2, 3, 4, 5) == [name_of(1), name_of(2)]


def test_a_block_that_has_gone_comes_back_with_its_uses() -> None:
    worth = Worth(20)
    assert used(worth, *range(1, 22), 1, 22) == [name_of(number) for number in (1, 2, 3)]
    assert used(worth, *range(100, 118)) == [name_of(number) for number in range(4, 22)]
    assert used(worth, 200) == [name_of(22)], "though 1 was used before it"


@given(st.integers(1, 8), st.lists(st.integers(0, 12), max_size=300), st.sets(st.integers(0, 12)))
def test_the_least_worth_goes_whatever_came_before(size: int, numbers: list[int], lost: set[int]) -> None:
    worth = Worth(size)
    used(worth, *numbers)
    for number in lost:
        worth.discard(name_of(number))
    left = dict(worth._worth)
    assert len(worth) == len(left) <= size
    assert [worth.pop() for _ in range(len(left))] == sorted(left, key=lambda name: (left[name], name))
    with pytest.raises(IndexError):
        worth.pop()


def test_host_memory_keeps_each_block_in_a_slot_of_its_own() -> None:
    blocks = HostBlocks(block_bytes=8, budget_bytes=3 * 8)
    for number in (1, 2, 1, 3, 4, 2, 5, 1):
        blocks.write(name_of(number), b"owner", memoryview(bytes([number] * 8)))
    held = [number for number in range(1, 6) if name_of(number) in blocks]
    assert len(held) == len(blocks) == 3
    for number in held:
        row = bytearray(8)
        assert blocks.read(name_of(number), memoryview(row))
        assert row == bytes([number] * 8)
