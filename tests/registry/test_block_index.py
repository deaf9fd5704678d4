"""The index beside plain sets, and its bound."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.registry.blocks.index import SHARDS, BlockIndex, names_of, slots_of

pytestmark = pytest.mark.fast

STEP = st.tuples(st.sampled_from(["open", "close", "add", "remove", "clear"]), st.integers(0, 10**6))


def by_hand(held: dict[int, set[int]], names: list[int]) -> dict[int, int]:
    """Slot: how many of the names from the first on it holds."""
    counts = {}
    for slot, blocks in held.items():
        counts[slot] = next((i for i, name in enumerate(names) if name not in blocks), len(names))
    return {slot: count for slot, count in counts.items() if count}


@settings(deadline=None)
@given(st.lists(STEP, max_size=60))
def test_the_index_says_what_plain_sets_say(steps: list[tuple[str, int]]) -> None:
    index, held = BlockIndex(100 * SHARDS), dict[int, set[int]]()
    for what, number in steps:
        chance = random.Random(number)
        names = [chance.randrange(12) for _ in range(chance.randrange(8))]
        if what == "open":
            slot = index.open()
            assert slot not in held
            held[slot] = set()
        elif what == "clear":
            for _ in range(number % (SHARDS + 1)):
                index.clear_some()
        elif held:
            slot = chance.choice(sorted(held))
            if what == "close":
                index.close(slot)
                del held[slot]
            elif what == "add":
                index.add(slot, names)
                held[slot].update(names)
            else:
                index.remove(slot, names)
                held[slot].difference_update(names)
        prompt = list(range(chance.randrange(12)))
        found = {slot: count for count, mask in index.holders(prompt) for slot in slots_of(mask)}
        assert found == by_hand(held, prompt)
    while index.clear_some():
        pass
    assert len(index) == len(set().union(*held.values()))


def test_closed_slots_are_used_again_once_cleared() -> None:
    index = BlockIndex(SHARDS)
    first = index.open()
    index.add(first, [1])
    index.close(first)
    assert index.open() != first, "its blocks are still there"
    while index.clear_some():
        pass
    assert index.open() == first
    assert index.holders([1]) == []


def test_a_full_index_drops_its_oldest_names_and_counts_them() -> None:
    index = BlockIndex(64 * SHARDS)
    slot = index.open()
    names = [random.Random(i).getrandbits(64) for i in range(96 * SHARDS)]
    for name in names:
        index.add(slot, [name])
    assert 56 * SHARDS < len(index) <= 64 * SHARDS
    assert index.dropped == len(names) - len(index)
    assert all(index.holders([name]) for name in names[-SHARDS:])
    assert not any(index.holders([name]) for name in names[:SHARDS])


def test_a_bound_below_one_name_a_shard_is_refused() -> None:
    with pytest.raises(ValueError, match="max_names must be at least"):
        BlockIndex(SHARDS - 1)


def test_names_are_half_of_each_hash() -> None:
    hashes = [bytes(range(i, i + 16)) for i in range(3)]
    assert names_of(hashes) == names_of(b"".join(hashes)) == [int.from_bytes(h[:8], "little") for h in hashes]
    assert names_of([]) == []
