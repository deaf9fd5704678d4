"""Damaged bytes cost the transfer they belong to, or the link where it cannot be followed any more; never a commit."""

from __future__ import annotations

import pytest

from tandem.transfer import TransferError
from tests.transfer.pair import SOON, Meet, Pair, network_for, until
from tests.transfer.tampering import TamperingNetwork


@pytest.fixture
def network(transport: str) -> TamperingNetwork:
    return TamperingNetwork(network_for(transport))


@pytest.fixture
def damaged(meet: Meet, transport: str, network: TamperingNetwork) -> Pair:
    return meet(transport, network=network)


@pytest.mark.parametrize("target", ["payload", "commit"])
def test_a_flipped_bit_aborts_its_transfer_alone(damaged: Pair, network: TamperingNetwork, target: str) -> None:
    pair = damaged
    bystander, outcome = pair.expect("bystander", [10, 11]), pair.expect("t", [1, 2])
    other, push = pair.begin("bystander", 2), pair.begin("t", 2)
    other.push(0, 0, [4, 5], pair.source[0])
    assert until(lambda: not other.reading)
    pair.link().probe(64, timeout_s=SOON).result(SOON)
    network.target.append(target)
    with pytest.raises(TransferError, match="DATA_LOSS"):
        pair.finish(push, [6, 7])
    assert outcome.get()[:2] == ("abort", "DATA_LOSS")
    pair.finish(other, [4, 5], [1, 2])
    assert bystander.get()[0] == "commit"
    assert pair.landed([10, 11], [4, 5])
    assert outcome.silent()


def test_a_damaged_header_ends_the_link_and_all_on_it(damaged: Pair, network: TamperingNetwork) -> None:
    pair = damaged
    bystander, outcome = pair.expect("bystander", [10, 11]), pair.expect("t", [1, 2])
    other, push, link = pair.begin("bystander", 2), pair.begin("t", 2), pair.link()
    link.probe(64, timeout_s=SOON).result(SOON)
    network.target.append("header")
    with pytest.raises(TransferError, match="UNAVAILABLE"):
        pair.finish(push, [6, 7])
    assert outcome.get()[:2] == ("abort", "DATA_LOSS")
    assert bystander.get()[:2] == ("abort", "DATA_LOSS")
    with pytest.raises(TransferError, match="UNAVAILABLE"):
        other.push(0, 0, [4, 5], pair.source[0])
    assert until(lambda: not link.healthy)
    pair.moves("next", [1, 2], [6, 7])
