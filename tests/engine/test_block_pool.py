from __future__ import annotations

import pytest

from tandem.engine import BlockRemoved, BlockStored
from tandem.engine.scheduling import BlockPool, block_owners
from tandem.engine.scheduling.moving_blocks import MovingBlocks

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


def test_blocks_are_of_the_tenant_whose_root_they_follow_and_leave_with_it() -> None:
    pool, other = BlockPool(6), b"other root"
    pool.owners.enter(ROOT, "ann")
    pool.owners.enter(other, "bob")
    pool.owners.enter(other, "eve")
    cached_chain(pool, A, B)
    (held,) = pool.take(1) or []
    pool.register(held, C, other)
    (unknown,) = pool.take(1) or []
    pool.register(unknown, D, b"a root of nobody")
    pool.register_tail(unknown, b"tail")
    pool.take_events()
    assert [pool.owners.of(name) for name in (A, B, C, D)] == ["ann", "ann", "bob", None]
    assert pool.counts() == {"ann": 2, "bob": 1, None: 1}
    assert pool.drop("bob") == 2, "bob's, and the one that may be"
    assert [bool(pool.match([name])) for name in (A, B, C, D)] == [True, True, False, False]
    assert pool.match_tail(b"tail") is None
    assert pool.take_events() == [BlockRemoved((C, D))]
    pool.check_integrity([[held], [unknown]])
    pool.release([held, unknown])
    assert pool.drop(None) == 2
    assert len(pool.owners) == 0
    assert pool.num_free == 6
    pool.check_integrity([])


def test_what_is_known_of_owners_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_owners, "MAX_ROOTS", 2)
    pool = BlockPool(2)
    for number in range(5):
        pool.owners.enter(bytes([number]), f"tenant {number}")
        (block,) = pool.take(1) or []
        pool.register(block, bytes([100 + number]), bytes([number]))
        pool.release([block])
    assert len(pool.owners) == 2
    assert pool.owners.tenants() == {"tenant 3", "tenant 4"}


def test_what_is_dropped_while_it_comes_does_not_land() -> None:
    pool = BlockPool(6)
    moving = MovingBlocks(pool, prefix_caching=True)
    for root, tenant in ((ROOT, "ann"), (b"other", "bob")):
        pool.owners.enter(root, tenant)
    assert moving.expect("1", [ROOT, A, B], 0)
    assert moving.expect("2", [b"other", C], 0)
    assert moving.drop("ann") == 0
    assert moving.coming() == {C}, "nobody waits for ann's"
    moving.land("1", 0, 2)
    moving.land("2", 0, 1)
    assert [bool(pool.match([name])) for name in (A, B, C)] == [False, False, True]
    pool.owners.hold_off("ann")
    assert moving.expect("3", [ROOT, A], 0) is None
    pool.owners.let_in("ann")
    assert moving.expect("4", [ROOT, A], 0)
    moving.land("4", 0, 1)
    assert pool.match([A])
    pool.check_integrity([])
