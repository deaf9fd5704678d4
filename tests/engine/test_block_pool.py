from __future__ import annotations

import pytest

from tandem.engine import BlockRemoved, BlockStored
from tandem.engine.scheduling import BlockPool

pytestmark = pytest.mark.fast

A, B, C, D = (bytes([n]) * 16 for n in range(4))
ROOT = b"root"


def cached_chain(pool: BlockPool, *names: bytes) -> list[int]:
    """Take, register and release a chain of blocks."""
    blocks = pool.take(len(names))
    assert blocks is not None
    for block, name, parent in zip(blocks, names, (ROOT, *names), strict=False):
        pool.register(block, name, parent)
    pool.release(blocks)
    return blocks


def test_cached_blocks_stay_findable_and_count_as_free() -> None:
    pool = BlockPool(4)
    blocks = cached_chain(pool, A, B)
    assert pool.num_free == 4
    assert pool.match([A, B, C]) == blocks
    assert pool.match([B]) == blocks[1:]
    assert pool.match([C, A]) == []
    taken = pool.take(1, pool.match([A, B]))
    assert taken is not None
    assert taken[:2] == blocks
    assert pool.num_free == 1
    pool.check_integrity([taken])
    pool.release(taken)
    pool.check_integrity([])
    assert pool.num_evicted == 0
    pool.take(3)
    assert pool.num_evicted == 1  # one of the two that were cached


def test_nothing_is_taken_without_room() -> None:
    pool = BlockPool(3)
    cached = cached_chain(pool, A, B)
    assert pool.take(2, cached) is None
    assert pool.num_free == 3
    pool.check_integrity([])
    held = pool.take(1, cached)
    assert pool.take(1) is None
    assert pool.take(0, cached) == cached  # shared: referenced twice
    pool.check_integrity([held or [], cached])


def test_nameless_blocks_go_first_then_the_oldest_leaf() -> None:
    pool = BlockPool(4)
    a, b = cached_chain(pool, A, B)
    (c,) = cached_chain(pool, C)
    order = [block for _ in range(4) for block in pool.take(1) or []]
    assert order[0] not in (a, b, c)
    assert order[1:] == [b, a, c]
    pool = BlockPool(2)
    nameless = pool.take(1) or []
    cached_chain(pool, A)
    pool.release(nameless)
    assert pool.take(1) == nameless


def test_use_makes_a_block_young_again() -> None:
    pool = BlockPool(3)
    (a,), (b,), (c,) = cached_chain(pool, A), cached_chain(pool, B), cached_chain(pool, C)
    pool.release(pool.take(0, [a]) or [])
    assert [block for _ in range(3) for block in pool.take(1) or []] == [b, c, a]


def test_of_two_equal_blocks_the_one_in_use_stays() -> None:
    pool = BlockPool(4)
    (old,) = cached_chain(pool, A)
    first = pool.take(1)
    assert first is not None
    pool.register(first[0], A, ROOT)
    assert pool.match([A]) == first
    assert pool.take(1) == [old]
    second = pool.take(1)
    assert second is not None
    pool.register(second[0], A, ROOT)
    assert pool.match([A]) == first
    pool.check_integrity([first, [old], second])


def test_events_tell_the_net_change_in_chains() -> None:
    pool = BlockPool(3)
    cached_chain(pool, A, B)
    cached_chain(pool, C)
    assert pool.take_events() == [BlockStored((A, B), ROOT), BlockStored((C,), ROOT)]
    assert pool.take_events() == []
    blocks = pool.take(2) or []  # evicts B and A
    assert pool.take_events() == [BlockRemoved((B, A))]
    pool.register(blocks[0], D, ROOT)
    pool.release(blocks)
    held = pool.take(3)
    assert pool.take_events() == [BlockRemoved((C,))]  # D came and went in between
    pool.register((held or [])[0], C, ROOT)
    pool.take_events()
    pool.release(held or [])
    again = pool.take(3) or []
    pool.register(again[0], C, ROOT)
    assert pool.take_events() == []  # C went and came back
    pool.check_integrity([again])


def test_integrity_names_what_is_wrong() -> None:
    pool = BlockPool(2)
    taken = pool.take(1) or []
    with pytest.raises(AssertionError, match=f"block {taken[0]}: 1 references, 0 sequences hold it"):
        pool.check_integrity([])
    with pytest.raises(AssertionError, match=f"block {taken[0]}: 1 references, 2 sequences hold it"):
        pool.check_integrity([taken, taken])
