"""NCCL's own troubles: a peer that stops, another order, a wrong id, an initialisation that hangs. Over a fake NCCL."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import pytest

from tandem.liveness.silence import Liveness
from tandem.transfer import Link, LinkPeer, LinkRuntime, LocalPeer, Receiver, Sender, TransferError
from tandem.transfer.transports import TRANSPORTS, nccl, nccl_communicator
from tandem.transfer.transports.nccl import NcclTransport
from tandem.transfer.transports.nccl_communicator import SENDER, Communicators, thread_communicators
from tests.transfer import fake_nccl
from tests.transfer.fake_nccl import FakeDevice, FakeNccl, NcclError
from tests.transfer.pair import DECODE, NUM_LAYERS, PREFILL, SOON, Meet, Pair, until


@pytest.fixture
def fakes(transports: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[FakeNccl]]:
    """Every fake made from now on; a pair's sender makes the first."""
    made: list[FakeNccl] = []

    def transport() -> NcclTransport:
        made.append(FakeNccl(FakeDevice()))
        return NcclTransport(thread_communicators(made[-1], made[-1].device))

    monkeypatch.setitem(TRANSPORTS, "nccl", transport)
    yield made
    for fake in made:
        fake.close()


@pytest.fixture
def pair(fakes: list[FakeNccl], meet: Meet) -> Pair:
    return meet("nccl")


def test_payloads_that_come_in_another_order_touch_no_block(pair: Pair, fakes: list[FakeNccl]) -> None:
    pair.link()
    first, second = pair.expect("first", [1]), pair.expect("second", [2])
    ours = fakes[0].communicators[-1]
    held: list[tuple[int, ...]] = []
    send = ours.send

    def swapped(*what: int) -> None:
        held.append(what)
        if len(held) == 2:
            send(*held[1])
            send(*held[0])

    ours.send = swapped  # type: ignore[method-assign]
    pushes = [pair.begin("first", 1), pair.begin("second", 1)]
    for push, here in zip(pushes, (4, 5), strict=True):
        push.push(0, 0, [here], pair.source[0])
    assert first.get()[:2] == ("abort", "DATA_LOSS")
    assert second.get()[:2] == ("abort", "DATA_LOSS")
    assert not any(cache.any() for cache in pair.cache)


def test_a_sender_that_stops_within_a_send_ends_the_link_and_no_other(
    pair: Pair, fakes: list[FakeNccl], meet: Meet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Liveness, "lost", lambda self, now: False)  # should this machine stand still
    link, outcome = pair.link(), pair.expect("t", [1, 2])
    rival = Sender(
        LocalPeer(LinkPeer("prefill-1", "p-7", "layout-a")), transports=("nccl",), runtime=LinkRuntime(pair.network)
    )
    other = pair.opened(rival, DECODE)
    fakes[0].device.close()  # nothing that is queued at the sender is done any more
    push = pair.begin("t", 2)
    push.push(0, 0, [4, 5], pair.source[0])
    assert outcome.get()[:2] == ("abort", "UNAVAILABLE")
    assert not any(cache.any() for cache in pair.cache)
    assert until(lambda: not link.healthy)
    assert other.healthy
    pair.sender, rival = rival, pair.sender
    pair.receiver.expect(
        "u", block_ids=[7], first_block=0, timeout_s=SOON, on_commit=lambda *_: None, on_abort=lambda *_: None
    )
    push = other.begin("u", first_block=0, num_blocks=1, num_layers=NUM_LAYERS, timeout_s=SOON)
    pair.push_all(push, 0, [9])
    push.commit(b"").result(SOON)
    assert pair.landed([7], [9])
    rival.close()


def test_an_aborted_communicator_is_replaced(pair: Pair, fakes: list[FakeNccl]) -> None:
    old = pair.link()
    fakes[1].communicators[-1].destroy()  # the receiver's NCCL is gone; its process and its links are not
    assert until(lambda: not old.healthy)
    pair.moves("t", [1, 2], [6, 7])
    assert pair.link() is not old


def test_initialisations_that_hang_cost_their_links_and_then_nccl_is_no_longer_offered(
    fakes: list[FakeNccl], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nccl_communicator, "INIT_SECONDS", 0.3)
    pair = Pair.of(("nccl", "tcp"))
    fakes[1].hang = True  # which the sender, whose peer never comes, sees as its own
    for _ in range(nccl_communicator.MAX_HANGING):
        with pytest.raises(TransferError, match=r"NCCL: not ready in 0\.3 s|closed by the peer"):
            pair.link()
    link = pair.link()
    assert link.transport == "tcp"
    assert "initialisations hang: restart" in link.refused["nccl"]
    pair.moves("t", [1], [2])
    pair.close()


def test_an_id_is_made_only_for_a_link_that_both_sides_want(fakes: list[FakeNccl]) -> None:
    pair = Pair.of(("tcp", "nccl"))
    for _ in range(3):
        assert pair.link().transport == "tcp"
        pair.sender.close_link(DECODE.worker_id, DECODE.incarnation)
    assert fakes[0].num_ids == 0
    pair.close()
    pair = Pair.of(("nccl", "tcp"))
    assert pair.link().transport == "nccl"
    assert [fake.num_ids for fake in fakes[2:]] == [1, 0]
    pair.close()


def test_connecting_is_done_before_a_link_is_ready_and_has_a_bound_of_its_own(
    pair: Pair, fakes: list[FakeNccl], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nccl_communicator, "PAYLOAD_SECONDS", 0.5)
    for fake in fakes:
        fake.connect_s = 1.0
    pair.moves("t", [1, 2], [6, 7])
    pair.sender.close_link(DECODE.worker_id, DECODE.incarnation)
    monkeypatch.setattr(nccl_communicator, "WARM_SECONDS", 0.2)
    with pytest.raises(TransferError, match=r"NCCL: no word came over it in 0\.2 s|closed by the peer"):
        pair.link()


def test_a_worker_has_so_many_communicators_and_no_more(fakes: list[FakeNccl], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_communicator, "MAX_COMMUNICATORS", 1)
    pair = Pair.of(("nccl", "tcp"))
    rival = Sender(LocalPeer(LinkPeer("prefill-1", "p-7", "layout-a")), transports=("nccl", "tcp"))
    assert pair.link().transport == "nccl"
    second = pair.opened(rival)
    assert second.transport == "tcp"
    assert second.refused == {"nccl": "the receiver has 1 NCCL communicators, as many as it makes"}
    rival.close_link(DECODE.worker_id, DECODE.incarnation)
    pair.sender.close_link(DECODE.worker_id, DECODE.incarnation)
    receiver = pair.receiver._transports[0]
    assert isinstance(receiver, NcclTransport)
    assert until(lambda: not receiver.all.held)  # once it has been aborted
    assert pair.opened(rival).transport == "nccl"
    rival.close()
    pair.close()


def test_where_nccl_makes_no_id_the_next_link_takes_another_transport(fakes: list[FakeNccl]) -> None:
    pair = Pair.of(("nccl", "tcp"))

    def refuse() -> bytes:
        raise NcclError("no socket interface found")

    fakes[0].get_unique_id = refuse  # type: ignore[method-assign]
    with pytest.raises(TransferError, match="NCCL does not start: no socket interface found"):
        pair.link()
    assert pair.link().refused == {"nccl": "NCCL does not start: no socket interface found"}
    pair.close()


def test_an_id_of_another_length_ends_the_link(pair: Pair, fakes: list[FakeNccl]) -> None:
    fakes[0].get_unique_id = lambda: bytes(7)  # type: ignore[method-assign]
    with pytest.raises(TransferError, match=r"invalid argument|closed by the peer"):
        pair.link()
    assert not fakes[1].communicators


class LastMomentLane:
    """Runs its jobs when it is closed."""

    def __init__(self, _name: str) -> None:
        self._jobs: list[Callable[[], None]] = []
        self.submit = self._jobs.append

    def close(self) -> None:
        while self._jobs:
            self._jobs.pop(0)()


def test_a_link_that_closes_as_its_communicator_comes_aborts_it_once() -> None:
    fake = FakeNccl(FakeDevice(driven=True), driven=True)
    everyone = Communicators(fake, fake.device, LastMomentLane, lambda: 0.0)
    communicator = everyone.open(object(), bytes(128), SENDER)
    communicator.close()
    assert [one.num_aborts for one in fake.communicators] == [1]
    assert not everyone.held
    fake.close()


def test_an_error_that_cupy_has_no_name_for_ends_the_link(pair: Pair, fakes: list[FakeNccl]) -> None:
    old = pair.link()

    def unknown() -> None:
        raise KeyError(6)  # what its table of names does with ncclRemoteError

    fakes[0].communicators[-1].check_async_error = unknown  # type: ignore[method-assign]
    assert until(lambda: old.error is not None)
    assert "NCCL: KeyError(6)" in str(old.error)
    pair.moves("t", [1, 2], [6, 7])


def test_a_wrong_id_never_meets_and_ends_within_the_deadline(
    pair: Pair, fakes: list[FakeNccl], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nccl_communicator, "INIT_SECONDS", 0.3)
    made = fakes[1].NcclCommunicator
    monkeypatch.setattr(fakes[1], "NcclCommunicator", lambda ndev, _id, rank: made(ndev, bytes(128), rank))
    with pytest.raises(TransferError, match=r"NCCL|closed by the peer"):  # whichever side's time is up first
        pair.link()


def test_other_versions_and_one_gpu_are_refused_by_name(fakes: list[FakeNccl], monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair.of(("nccl", "tcp"))
    fakes[1].version = 23003
    assert pair.link().refused == {"nccl": "NCCL 22809 at the sender, 23003 at the receiver"}
    pair.sender.close_link(DECODE.worker_id, DECODE.incarnation)
    fakes[1].version = 22809
    monkeypatch.setattr(FakeDevice, "identity", lambda _self: "GPU-1")
    assert "both are on GPU GPU-1" in pair.link().refused["nccl"]
    pair.close()


def test_without_cupy_the_reason_is_named_and_the_next_transport_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TRANSPORTS, "nccl", nccl.load_nccl)
    monkeypatch.setitem(sys.modules, "cupy.cuda", None)
    pair = Pair.of(("nccl", "tcp"))
    link: Link = pair.link()
    assert link.transport == "tcp"
    assert "pip install 'tandem[gpu]'" in link.refused["nccl"]
    pair.close()
    with pytest.raises(ValueError, match="transports: none can be used here: nccl: cupy is missing"):
        Receiver(LocalPeer(DECODE), pair.cache, host="127.0.0.1", transports=("nccl",))
    with pytest.raises(ValueError, match="cupy is missing"):
        Sender(LocalPeer(PREFILL), transports=("nccl",))


LOG = """host:1:2 [0] NCCL INFO NET/Plugin: no plugin found
host:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/Socket/0
host:1:2 [0] NCCL INFO Channel 01/0 : 0[0] -> 1[0] via P2P/CUMEM
host:1:2 [0] NCCL INFO Channel 02 : 1[0] -> 0[0] via SHM/direct/direct
host:1:2 [0] NCCL INFO Channel 03/0 : 0[0] -> 1[0] [send] via NET/IB/0/GDRDMA
"""


def test_what_carries_nccl_is_read_from_its_log() -> None:
    assert nccl.carriers(LOG) == {"NET/Socket", "P2P/CUMEM", "SHM/direct", "NET/IB"}
    assert nccl.carriers("") == set()


def test_what_is_queued_in_a_group_begins_with_its_end() -> None:
    fake = FakeNccl(FakeDevice(driven=True), driven=True)
    queue = fake.device.queue()
    communicator = fake.NcclCommunicator(2, bytes(128), 1)
    fake.groupStart()
    communicator.send(0, 0, fake.NCCL_UINT8, 0, queue.pointer)
    event = queue.record()
    assert queue.step()
    assert event.query()
    fake.groupEnd()
    assert not queue.step()
    fake.close()


def test_a_damaged_payload_is_found_by_the_sum_of_the_device(pair: Pair) -> None:
    outcome = pair.expect("t", [1, 2])
    push = pair.begin("t", 2)
    fake_nccl.damage_next.append("payload")
    with pytest.raises(TransferError, match="DATA_LOSS"):
        pair.finish(push, [4, 5])
    assert outcome.get()[:2] == ("abort", "DATA_LOSS")
    assert not any(cache.any() for cache in pair.cache)
