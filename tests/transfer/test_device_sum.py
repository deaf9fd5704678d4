"""The sum that a device computes: equal wherever, and different for whatever changes."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from tandem.transfer.copy.device_sum import MASK, DeviceSum, weights

CPU = torch.device("cpu")


def words(seed: int, count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**63), 2**63 - 1, (count,), generator=generator)


def by_hand(found: torch.Tensor) -> int:
    """In Python's own integers."""
    total = 0
    for word, weight in zip(found.tolist(), weights(len(found)).tolist(), strict=True):
        mixed = word * 0x9E3779B97F4A7C15 & MASK
        signed = mixed - 2**64 if mixed >> 63 else mixed
        total += (mixed ^ (signed >> 32 & MASK)) * weight
    return total & MASK


@given(st.integers(0, 2**32), st.integers(1, 300))
def test_it_is_what_it_says(seed: int, count: int) -> None:
    found = words(seed, count)
    assert int(DeviceSum(CPU)(found)) & MASK == by_hand(found)


@given(st.integers(0, 2**32), st.integers(1, 300), st.data())
def test_a_flipped_bit_changes_it(seed: int, count: int, data: st.DataObject) -> None:
    found, total = words(seed, count), DeviceSum(CPU)
    before = int(total(found))
    place, bit = data.draw(st.integers(0, count - 1)), data.draw(st.integers(0, 62))
    found[place] ^= 1 << bit
    assert int(total(found)) != before


@given(st.integers(0, 2**32), st.sampled_from([1, 4, 64, 512]), st.integers(2, 9), st.data())
def test_blocks_that_change_places_change_it(seed: int, size: int, count: int, data: st.DataObject) -> None:
    """Also where they differ in nothing but the highest bits, as small floats do."""
    high = words(seed, count * size) << 48
    blocks = high.view(count, size)
    a, b = data.draw(st.permutations(range(count)))[:2]
    swapped = blocks.clone()
    swapped[[a, b]] = blocks[[b, a]]
    total = DeviceSum(CPU)
    assert torch.equal(blocks, swapped) or int(total(blocks)) != int(total(swapped))
