"""NCCL's own troubles: a peer that stops, another order, a wrong id, an initialisation that hangs. Over a fake NCCL."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from tandem.transfer import Endpoint, Link, Receiver, Sender, TransferError
from tandem.transfer.transports import TRANSPORTS, nccl
from tandem.transfer.transports.nccl import NcclTransport
from tests.transfer import fake_nccl
from tests.transfer.fake_nccl import FakeCommunicator, FakeDevice, FakeNccl, NcclError
from tests.transfer.pair import DECODE, NUM_LAYERS, PREFILL, SOON, Meet, Pair, until

REBUILD_S = 2.0


@pytest.fixture
def fakes(transports: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[FakeNccl]]:
    """Every fake made from now on; a pair's sender makes the first."""
    made: list[FakeNccl] = []

    def transport() -> NcclTransport:
        made.append(FakeNccl(FakeDevice()))
        return NcclTransport(made[-1], made[-1].device)

    monkeypatch.setitem(TRANSPORTS, "nccl", transport)
    yield made
    for fake in made:
        fake.close()


@pytest.fixture
def pair(fakes: list[FakeNccl], meet: Meet) -> Pair:
    return meet("nccl")


REAL = """
import json, cupy.cuda.nccl
from cupy_backends.cuda.libs import nccl
line = lambda what: what.__doc__.splitlines()[0]
made = nccl.NcclCommunicator
methods = ("send", "recv", "abort", "destroy", "check_async_error", "rank_id", "size")
functions = ("get_version", "get_unique_id", "groupStart", "groupEnd")
print(json.dumps({
    "methods": {name: line(getattr(made, name)) for name in methods}, "made": line(made),
    "functions": {name: line(getattr(nccl, name)) for name in functions}, "uint8": nccl.NCCL_UINT8,
    "id_bytes": len(nccl.get_unique_id()), "error": issubclass(nccl.NcclError, RuntimeError),
}))
"""


def test_the_fake_has_the_real_ones_signatures() -> None:
    """Asked of the real one in a process of its own, which loads cupy and NCCL's library, and needs no GPU."""
    found = subprocess.run([sys.executable, "-W", "ignore", "-c", REAL], capture_output=True, text=True, timeout=60)
    if "ImportError" in found.stderr or "ModuleNotFoundError" in found.stderr:
        pytest.skip("needs cupy and NCCL's library: pip install 'tandem[gpu]' nvidia-nccl-cu13")
    real, fake = json.loads(found.stdout), FakeNccl(FakeDevice())
    for name, described in real["methods"].items():
        assert parameters(described) == list(inspect.signature(getattr(FakeCommunicator, name)).parameters), name
    assert parameters(real["made"]) == list(inspect.signature(fake.NcclCommunicator).parameters)
    for name, described in real["functions"].items():
        assert parameters(described) == list(inspect.signature(getattr(fake, name)).parameters) == [], name
    assert real["uint8"] == fake.NCCL_UINT8
    assert real["id_bytes"] == len(fake.get_unique_id())
    assert real["error"]
    assert issubclass(NcclError, RuntimeError)
    fake.close()


def parameters(described: str) -> list[str]:
    """Names, of a Cython signature such as `f(self, size_t count, Config config=None)`."""
    inside = described.partition("(")[2].rpartition(")")[0]
    return [part.split("=")[0].split()[-1] for part in inside.split(", ") if part]


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
    pair: Pair, fakes: list[FakeNccl], meet: Meet
) -> None:
    link, outcome = pair.link(), pair.expect("t", [1, 2])
    rival = Sender(Endpoint("prefill-1", "p-7", "layout-a"), transports=("nccl",), network=pair.network)
    other = pair.opened(rival, DECODE)
    fakes[0].device.close()  # nothing that is queued at the sender is done any more
    push = pair.begin("t", 2)
    push.push(0, 0, [4, 5], pair.source[0])
    start = time.monotonic()
    assert outcome.get()[:2] == ("abort", "UNAVAILABLE")
    assert time.monotonic() - start < nccl.PAYLOAD_SECONDS + 1.0
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


def test_an_aborted_communicator_is_replaced_within_two_seconds(pair: Pair, fakes: list[FakeNccl]) -> None:
    old = pair.link()
    fakes[1].communicators[-1].destroy()  # the receiver's NCCL is gone; its process and its links are not
    start = time.monotonic()
    assert until(lambda: not old.healthy)
    pair.moves("t", [1, 2], [6, 7])
    assert time.monotonic() - start < REBUILD_S
    assert pair.link() is not old


def test_initialisations_that_hang_cost_their_links_and_then_nccl_is_no_longer_offered(
    fakes: list[FakeNccl], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nccl, "INIT_SECONDS", 0.3)
    pair = Pair.of(("nccl", "tcp"))
    fakes[1].hang = True  # which the sender, whose peer never comes, sees as its own
    for _ in range(nccl.MAX_HANGING):
        with pytest.raises(TransferError, match=r"NCCL: not ready in 0\.3 s|closed by the peer"):
            pair.link()
    link = pair.link()
    assert link.transport == "tcp"
    assert "initialisations hang: restart" in link.refused["nccl"]
    pair.moves("t", [1], [2])
    pair.close()


def test_a_wrong_id_never_meets_and_ends_within_the_deadline(
    pair: Pair, fakes: list[FakeNccl], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nccl, "INIT_SECONDS", 0.3)
    made = fakes[1].NcclCommunicator
    monkeypatch.setattr(fakes[1], "NcclCommunicator", lambda ndev, _id, rank: made(ndev, bytes(128), rank))
    start = time.monotonic()
    with pytest.raises(TransferError, match=r"NCCL|closed by the peer"):  # whichever side's time is up first
        pair.link()
    assert time.monotonic() - start < 2.0


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
        Receiver(DECODE, pair.cache, host="127.0.0.1", transports=("nccl",))
    with pytest.raises(ValueError, match="cupy is missing"):
        Sender(PREFILL, transports=("nccl",))


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
