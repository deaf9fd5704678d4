"""Payloads in a link's outgoing memory never overlap, and all of it is free again in the end."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest

from tandem.transfer.copy.copier import Copier
from tandem.transfer.runtime.slots import MAX_SLOTS, Slots
from tandem.transfer.transports.base import SendSide, Slot
from tandem.transfer.transports.host import InlineSendSide
from tandem.transfer.transports.shm import ShmSendSide

SIZE, BLOCK = 1 << 16, 256
SIDES = [InlineSendSide, ShmSendSide]


def apart(slots: Iterable[Slot], side: SendSide) -> bool:
    at = side.start
    for slot in sorted(slots, key=lambda slot: slot.offset):
        if slot.offset < at:
            return False
        at = slot.offset + slot.nbytes
    return at <= side.start + side.size


@pytest.mark.parametrize("make", SIDES)
def test_slots_are_apart_whatever_the_order_in_which_they_are_given_back(
    make: type[InlineSendSide] | type[ShmSendSide],
) -> None:
    side, dice = make(SIZE, Copier()), random.Random(7)
    slots, taken, refused = Slots(side, BLOCK, SIZE // 4), list[Slot](), 0
    for _ in range(5000):
        if taken and dice.random() < 0.5:
            slots.give(taken.pop(dice.randrange(len(taken))).offset)
        elif slot := slots.take(dice.randint(1, slots.frame_bytes)):
            taken.append(slot)
        else:
            refused += 1
        assert apart(taken, side)
    assert refused
    for slot in taken:
        slots.give(slot.offset)
    assert slots.num_taken == 0
    assert slots.take(SIZE)
    side.close()


@pytest.mark.parametrize("make", SIDES)
def test_short_frames_take_no_more_room_than_they_need(make: type[InlineSendSide] | type[ShmSendSide]) -> None:
    side = make(SIZE, Copier())
    slots = Slots(side, BLOCK, SIZE // 4)
    taken = [slot for _ in range(SIZE // BLOCK) if (slot := slots.take(BLOCK))]
    assert len(taken) == SIZE // BLOCK < MAX_SLOTS
    assert slots.take(1) is None
    slots.give(taken[0].offset)
    assert slots.take(BLOCK) == taken[0]
    side.close()


def test_no_more_slots_than_a_side_can_remember() -> None:
    side = ShmSendSide(SIZE, Copier())
    slots = Slots(side, 64, SIZE // 4)
    assert sum(slots.take(64) is not None for _ in range(SIZE // 64)) == MAX_SLOTS
    side.close()
