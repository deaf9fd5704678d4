"""Blocks on a device are gathered behind what computes them, while the thread that pushed them goes on."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from tandem.transfer.transports import TRANSPORTS
from tandem.transfer.transports.nccl import NcclTransport
from tandem.transfer.transports.nccl_communicator import thread_communicators
from tests.transfer.fake_nccl import FakeDevice, FakeEvent, FakeNccl
from tests.transfer.pair import SOON, Meet, Pair, until


class BusyDevice(FakeDevice):
    """Says which thread asked for what, in order. A gather behind `computing` waits until that is done."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, str]] = []

    def mark(self) -> FakeEvent:
        self._note("mark")
        return super().mark()

    def upload(self, words: torch.Tensor) -> torch.Tensor:
        self._note("gather")
        return super().upload(words)

    def _note(self, what: str) -> None:
        self.calls.append((what, threading.current_thread().name.partition("-to-")[0]))


@pytest.fixture
def device(transports: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[BusyDevice]:
    """The sender's."""
    made: list[FakeNccl] = []

    def transport() -> NcclTransport:
        made.append(FakeNccl(FakeDevice() if made else device))
        return NcclTransport(thread_communicators(made[-1], made[-1].device))

    device = BusyDevice()
    monkeypatch.setitem(TRANSPORTS, "nccl", transport)
    yield device
    for fake in made:
        fake.close()


@pytest.fixture
def pair(device: BusyDevice, meet: Meet) -> Pair:
    return meet("nccl")


def test_a_push_returns_while_its_blocks_are_computed_and_sends_what_they_hold_then(
    pair: Pair, device: BusyDevice
) -> None:
    outcome, push = pair.expect("t", [1, 2]), pair.begin("t", 2)
    device.computing, device.calls = FakeEvent(), []
    pair.push_all(push, 0, [4, 5])
    committed = push.commit(b"")
    assert until(lambda: ("gather", "kv") in device.calls)  # it waits for the mark: nothing has been read
    assert push.reading
    assert not committed.done()
    for kv in pair.source:
        kv[[4, 5]] += 1.0
    device.computing.done = True
    committed.result(SOON)
    assert outcome.get()[0] == "commit"
    assert pair.landed([1, 2], [4, 5])
    assert not push.reading
    marks = [thread for what, thread in device.calls if what == "mark"]
    gathers = [thread for what, thread in device.calls if what == "gather"]
    assert marks == [threading.current_thread().name] * 3
    assert gathers == ["kv"] * 3


def test_blocks_of_a_push_that_was_aborted_are_nobodys_to_read(pair: Pair, device: BusyDevice) -> None:
    outcome, push = pair.expect("t", [1, 2]), pair.begin("t", 2)
    device.computing = FakeEvent()
    pair.push_all(push, 0, [4, 5])
    push.abort("the client left")
    assert not push.reading
    for kv in pair.source:
        kv[[4, 5]] = 7.0
    device.computing.done = True
    assert outcome.get()[:2] == ("abort", "ABORTED")
    pair.moves("next", [1, 2], [6, 7])
    assert not any(cache[cache == 7.0].any() for cache in pair.cache)
