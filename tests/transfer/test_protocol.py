"""The protocol under every fault a network can have: never a commit unless every byte is right."""

from __future__ import annotations

import random
from concurrent.futures import Future

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.liveness.silence import LIMIT_S, QUIET, Vitals
from tandem.transfer.protocol.endpoint import TransferError
from tandem.transfer.protocol.landings import Landing, Landings
from tandem.transfer.protocol.receiver import Write
from tandem.transfer.protocol.wire import (
    HEADER_BYTES,
    Extent,
    Kind,
    KVSource,
    LinkMessage,
    control,
    parse_header,
    pulse_of,
)
from tandem.transfer.runtime.shared_landings import SharedLandings
from tests.transfer.simulation import ARENA_SLOTS, DEADLINE, NUM_BLOCKS, Chances, TransferWorld

chance = st.sampled_from([0.0, 0.0, 0.02, 0.1, 0.3])
every_chance = st.builds(
    Chances, drop=chance, double=chance, swap=chance, damage=chance, stale=chance, overwrite=chance, cancel=chance,
    abort=chance,
)  # fmt: skip


def run(seed: int, chances: Chances, *, shm: bool) -> TransferWorld:
    world = TransferWorld(seed, chances, shm=shm)
    blocks = random.Random(seed).sample(range(NUM_BLOCKS), 15)
    for name, start in (("a", 0), ("b", 5), ("c", 10)):
        world.start(name, blocks[start : start + 5], first_block=seed % 3)
        world.step()
    for _ in range(15):
        world.step()
    world.finish()
    return world


@pytest.mark.long
@given(seed=st.integers(0, 2**32), chances=every_chance, shm=st.booleans())
@settings(max_examples=800, deadline=None)
def test_no_fault_makes_a_wrong_byte_visible(seed: int, chances: Chances, shm: bool) -> None:
    world = run(seed, chances, shm=shm)
    for transfer in world.transfers:
        assert len(transfer.endings) == 1, f"{transfer.name} ended {transfer.endings}"
        blocks = transfer.there[transfer.first_block :]
        assert np.array_equal(world.cache[:, blocks], world.settled[transfer.name]), f"{transfer.name}: late write"
    assert not world.table.live
    assert not world.table.ending


@given(seed=st.integers(0, 2**32), shm=st.booleans())
@settings(max_examples=25, deadline=None)
def test_without_faults_everything_commits_and_every_slot_comes_back(seed: int, shm: bool) -> None:
    world = run(seed, Chances(), shm=shm)
    assert [transfer.endings for transfer in world.transfers] == [["commit"]] * 3
    assert len(world.free) == ARENA_SLOTS
    assert not world.lost


@given(seed=st.integers(0, 2**32), shm=st.booleans())
@settings(max_examples=25, deadline=None)
def test_aborts_and_cancels_give_every_slot_back(seed: int, shm: bool) -> None:
    world = run(seed, Chances(abort=0.1, cancel=0.1), shm=shm)
    assert len(world.free) == ARENA_SLOTS
    assert not world.lost


@given(seed=st.integers(0, 2**32), shm=st.booleans())
@settings(max_examples=25, deadline=None)
def test_frames_of_another_incarnation_land_nowhere(seed: int, shm: bool) -> None:
    world = TransferWorld(seed, Chances(stale=1.0), shm=shm)
    transfer = world.start("a", [3, 1, 2], 0)
    for _ in range(5):
        world.step()
    assert not world.cache.any()
    assert transfer.endings == []


def write_under_way() -> tuple[TransferWorld, Write]:
    """A world in which a frame has been checked and its copy has begun."""
    world = TransferWorld(0, Chances(), shm=False)
    world.start("a", [3, 1], 0)
    world.push_next()
    while world.sender.outbox:
        if write := world.receiver.receive(world.sender.outbox.popleft(), world.now):
            assert world.receiver.start(write)
            return world, write
    raise AssertionError("no frame was sent")


def test_a_fence_holds_once_the_write_in_progress_is_over_however_often_it_is_asked_for() -> None:
    world, write = write_under_way()
    landings = SharedLandings()
    landings.table = world.table
    fences = [landings.cancel("a"), landings.cancel("a")]
    assert not any(fence.done() for fence in fences)
    with pytest.raises(ValueError, match="'a' is expected already"):
        world.start("a", [5], 0)
    world.receiver.written(write, write.message.payload_sum)
    landings.report(world.receiver.ended)
    assert all(fence.done() for fence in fences)
    assert not world.table.ending
    assert landings.cancel("a").done()


def test_a_transfer_cancelled_between_check_and_copy_is_not_copied() -> None:
    world = TransferWorld(0, Chances(), shm=False)
    world.start("a", [3, 1], 0)
    world.push_next()
    writes = [world.receiver.receive(message, world.now) for message in world.sender.outbox]
    (write,) = filter(None, writes)
    world.table.cancel("a", Future())
    assert world.table.fenced, "no write is under way: its blocks may be another's"
    assert not world.receiver.start(write)
    assert world.receiver.read == [write.message], "its slot is free again"


def test_an_owner_hears_of_the_end_only_after_the_write_in_progress() -> None:
    world, write = write_under_way()
    world.table.tick(DEADLINE)
    assert not world.receiver.ended
    world.receiver.written(write, write.message.payload_sum)
    (ended,) = world.receiver.ended
    assert ended.error is not None
    assert ended.error.code == "DEADLINE_EXCEEDED"


def test_a_silent_peer_is_given_up_by_both_sides() -> None:
    world = TransferWorld(0, Chances(), shm=False)
    for side in (world.sender, world.receiver):
        for look in range(3, 15):
            side.tick(look / 10)
        with pytest.raises(TransferError, match="UNAVAILABLE"):
            side.tick(1.6)


def test_a_link_that_carries_nothing_one_way_is_given_up_by_its_sender() -> None:
    """Even if the receiver is the only one; not by a sender that has just not been run itself."""
    world = TransferWorld(0, Chances(), shm=False)
    world.sender.liveness.sole = True

    def tick(at: float, unheard_s: float) -> None:
        ping = control(Kind.PING, pulse_of(QUIET, unheard_s), nonce=nonce_of(world))
        world.sender.receive(ping, at)
        world.sender.liveness.heard_at = at
        world.sender.tick(at)

    for look in range(1, 15):
        tick(look / 10, unheard_s=look / 10)
    tick(4.0, unheard_s=2.6)  # it was asleep
    for look in range(41, 60):
        tick(look / 10, unheard_s=0.1)
    for look in range(60, 75):
        tick(look / 10, unheard_s=look / 10 - 6)
    with pytest.raises(TransferError, match="hears nothing"):
        tick(7.6, unheard_s=1.6)


def test_a_ping_says_how_starved_its_sender_is_and_whether_it_can_be_replaced() -> None:
    world = TransferWorld(0, Chances(), shm=False)
    starved = pulse_of(Vitals(lambda: 3.0, is_sole=lambda: True))
    world.receiver.receive(control(Kind.PING, starved, nonce=nonce_of(world)), 0.0)
    assert world.receiver.liveness.sole
    world.receiver.receive(control(Kind.PING, pulse_of(Vitals(lambda: 3.0)), nonce=nonce_of(world)), 0.0)
    assert world.receiver.liveness.limit_s == 4 * LIMIT_S
    for body in (b"", b'{"starvation": -1, "is_sole": false, "unheard_s": 0}'):
        with pytest.raises(TransferError, match="DATA_LOSS"):
            world.receiver.receive(control(Kind.PING, body, nonce=nonce_of(world)), 0.0)


def test_a_link_that_its_sender_has_replaced_is_given_up_as_soon_as_any() -> None:
    """Though nobody could take the sender's place: on the new link it is there."""
    world = TransferWorld(0, Chances(), shm=False)
    world.receiver.liveness.sole = True
    for look in range(3, 20):
        world.receiver.tick(look / 10)
    world.table.linked(world.receiver._sender, "another")
    with pytest.raises(TransferError, match="UNAVAILABLE"):
        world.receiver.tick(2.0)


def test_what_may_have_begun_on_a_lost_link_is_not_waited_for_on_the_next() -> None:
    table, lost = Landings(), TransferError("UNAVAILABLE", "the link is lost")

    def expect(name: str) -> None:
        table.expect(Landing(name, np.arange(2), 0, DEADLINE, lambda *_: None, lambda *_: None, "p"))

    table.linked("p", "first")
    expect("asked for on the first link")
    table.linked("p", "second")
    expect("asked for on the second")
    table.lost("p", "first", lost)
    assert list(table.live) == ["asked for on the second"]
    table.lost("p", "second", lost)
    assert not table.live


def test_what_was_begun_on_a_link_that_was_lost_here_already_is_not_waited_for_for_long() -> None:
    """Its sender, which had not noticed yet, begins on its new link at once whatever it has not begun."""
    world = TransferWorld(0, Chances(), shm=False)
    sender, table = world.receiver._sender, world.table

    def expect(name: str) -> None:
        table.expect(Landing(name, np.arange(2), 0, DEADLINE, lambda *_: None, lambda *_: None, sender))

    table.lost(sender, world.receiver, TransferError("UNAVAILABLE", "the link is lost"))
    expect("begun on the lost link")
    table.linked(sender, world.receiver)
    expect("asked for since")
    for look in range(1, 16):
        world.receiver.receive(control(Kind.PING, pulse_of(QUIET), nonce=nonce_of(world)), look / 10)
        assert len(table.live) == 2
        world.receiver.tick(look / 10)
    assert list(table.live) == ["asked for since"]
    (ended,) = table.ended
    assert (ended.transfer_id, ended.error and ended.error.code) == ("begun on the lost link", "UNAVAILABLE")


def nonce_of(world: TransferWorld) -> int:
    return world.receiver._nonce


@given(
    kind=st.sampled_from(Kind), handle=st.integers(0, 2**64 - 1), layer=st.integers(0, 2**32 - 1),
    length=st.integers(0, 2**32 - 1), bit=st.integers(0, HEADER_BYTES * 8 - 1),
    extent=st.builds(Extent, *6 * [st.integers(0, 2**16 - 1)]), source=st.sampled_from(KVSource),
)  # fmt: skip
def test_a_header_survives_the_wire_and_no_flipped_bit_does(
    kind: Kind, handle: int, layer: int, length: int, bit: int, extent: Extent, source: KVSource
) -> None:
    message = LinkMessage(kind, 7, handle, layer, 5, 6, length, 64, 9, source, extent)
    header = message.header()
    assert parse_header(header) == message
    damaged = bytearray(header)
    damaged[bit // 8] ^= 1 << bit % 8
    with pytest.raises(TransferError, match="DATA_LOSS"):
        parse_header(bytes(damaged))
