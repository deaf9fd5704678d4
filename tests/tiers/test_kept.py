"""Whose blocks go from a full tier: quota, time to live, pins."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.tiers import HostBlocks, KeepRules
from tandem.tiers.kept import KeptBlocks

pytestmark = pytest.mark.fast
ANN, BOB, EVE = b"ann", b"bob", b"eve"


def name_of(number: int) -> bytes:
    return number.to_bytes(4, "big")


def kept(blocks: KeptBlocks, owner: bytes, *numbers: int) -> list[tuple[bytes, int]]:
    """Keep these; returns whose blocks went, and which."""
    gone = []
    for number in numbers:
        gone += blocks.make_room(name_of(number), owner)
        blocks.use(name_of(number), owner)
    return [(block.owner, int.from_bytes(block.name, "big")) for block in gone]


def test_beyond_its_share_a_tenants_own_least_goes() -> None:
    blocks = KeptBlocks(10, KeepRules(tenant_share=0.3))
    assert kept(blocks, BOB, 1, 2, 3) == []
    assert kept(blocks, ANN, 11, 12, 13, 14, 15) == [(ANN, 11), (ANN, 12)]
    assert kept(blocks, BOB, 1, 4) == [(BOB, 2)]
    assert kept(blocks, EVE, 21, 22, 23) == []
    assert kept(blocks, b"new", 31, 32) == [(BOB, 3)], "where all are full together, the least of all"


def test_a_pinned_tenants_blocks_stay_until_they_are_half() -> None:
    now = 0.0
    blocks = KeptBlocks(10, KeepRules(now=lambda: now))
    kept(blocks, ANN, 1, 2, 3, 4, 5)
    blocks.pin(ANN, 60.0)
    assert kept(blocks, BOB, *range(11, 20)) == [(BOB, 11), (BOB, 12), (BOB, 13), (BOB, 14)]
    assert kept(blocks, ANN, 6) == [(BOB, 15)]
    assert kept(blocks, BOB, 20) == [(ANN, 1)], "more than half protect nothing"
    now = 60.0
    assert kept(blocks, BOB, 21) == [(ANN, 2)], "its time is over"
    blocks.pin(ANN, 39.0)
    blocks.pin(ANN, 0.0)
    assert kept(blocks, BOB, 22) == [(ANN, 3)]


def test_a_block_changes_its_owner_at_once() -> None:
    blocks = KeptBlocks(4)
    kept(blocks, ANN, 1, 2)
    assert kept(blocks, BOB, 1) == [(ANN, 1)]
    assert blocks.counts == {ANN: 1, BOB: 1}
    assert [block.name for block in blocks.drop(ANN)] == [name_of(2)]
    assert (len(blocks), blocks.counts) == (1, {BOB: 1})


@given(
    st.integers(1, 8),
    st.sampled_from([0.01, 0.3, 0.5, 1.0]),
    st.lists(st.tuples(st.sampled_from([ANN, BOB, EVE]), st.integers(0, 12), st.booleans()), max_size=200),
)
def test_shares_hold_and_nobody_loses_by_anothers_share(
    size: int, share: float, uses: list[tuple[bytes, int, bool]]
) -> None:
    blocks, most = KeptBlocks(size, KeepRules(tenant_share=share)), max(1, int(size * share))
    for owner, number, drops in uses:
        if drops:
            blocks.drop(owner)
        was_full = len(blocks) >= size
        gone = blocks.make_room(owner + name_of(number), owner)
        assert was_full or {block.owner for block in gone} <= {owner}
        blocks.use(owner + name_of(number), owner)
        assert len(blocks) == sum(blocks.counts.values()) <= size
        assert max(blocks.counts.values()) <= most


def test_host_memory_uses_its_slots_again() -> None:
    blocks = HostBlocks(block_bytes=8, budget_bytes=4 * 8, rules=KeepRules(tenant_share=0.5))
    for number in (1, 2, 3, 4):
        blocks.write(name_of(number), ANN if number % 2 else BOB, memoryview(bytes([number] * 8)))
    assert blocks.drop(ANN) == 2
    assert [name_of(number) in blocks for number in (1, 2, 3, 4)] == [False, True, False, True]
    for number in (5, 7, 9):
        blocks.write(name_of(number), ANN, memoryview(bytes([number] * 8)))
    assert blocks.counts == {ANN: 2, BOB: 2}
    row = bytearray(8)
    for number in (2, 4, 7, 9):
        assert blocks.read(name_of(number), memoryview(row))
        assert row == bytes([number] * 8)
    assert not blocks.read(name_of(5), memoryview(row))


def test_what_went_is_told_once_however_it_went() -> None:
    now = 0.0
    blocks = KeptBlocks(4, KeepRules(ttl_s=10.0, now=lambda: now))
    kept(blocks, ANN, 1, 2, 3)
    kept(blocks, BOB, 4, 5)
    blocks.drop(BOB)
    now = 11.0
    blocks.expire(1)
    assert list(blocks.gone) == [name_of(number) for number in (1, 4, 5, 2)]
    assert set(blocks) == {name_of(3)}
