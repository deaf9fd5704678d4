"""Both ends of KV transfer report what they hold."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.transfer.pair import NUM_LAYERS, Pair, make_pair, until

BLOCKS = [3, 4]


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = make_pair("tcp")
    yield pair
    pair.close()


def test_what_nobody_accounts_for_is_named(pair: Pair) -> None:
    pair.expect("lost", BLOCKS)
    push = pair.begin("lost", len(BLOCKS))
    pair.push_all(push, 0, BLOCKS)
    sender, receiver = pair.sender.check_integrity(()), pair.receiver.check_integrity(())
    assert receiver.violations == ("transfer lost: expected, but for no sequence",)
    assert sender.violations == ("push lost: under way, but no request's",)
    assert (sender.held["transfers"], receiver.held["transfers"]) == (1, 1)
    assert pair.sender.check_integrity({"lost"}).violations == ()
    assert pair.receiver.check_integrity({"lost"}).violations == ()


def test_nothing_is_held_once_all_has_ended(pair: Pair) -> None:
    pair.moves("a", BLOCKS, [0, 1])
    outcome = pair.expect("b", BLOCKS)
    push = pair.begin("b", len(BLOCKS))
    push.push(NUM_LAYERS - 1, 0, BLOCKS, pair.source[0])
    push.abort("enough")
    assert outcome.get()[0] == "abort"
    links = {"transfers": 0, "kv_links": 1}
    assert until(lambda: pair.sender.check_integrity(()).held == {**links, "slots": 0})
    assert until(lambda: pair.receiver.check_integrity(()).held == links)
    assert not pair.sender.check_integrity(()).violations + pair.receiver.check_integrity(()).violations


def test_a_slot_that_no_transfer_has_is_named(pair: Pair) -> None:
    link = pair.link()
    assert until(lambda: pair.sender.check_integrity(()).held["slots"] == 0)
    link._end.slots.take(1)
    assert pair.sender.check_integrity(()).violations == (
        "link to decode-0/d-1: 1 slots are taken, and nothing is under way",
    )
