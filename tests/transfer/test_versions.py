"""Peers of this wire version and of the one before move KV, whichever of them sends."""

from __future__ import annotations

import json
import socket
import threading
from dataclasses import asdict

import pytest
import torch

from tandem.transfer import LocalPeer, Receiver, Sender
from tandem.transfer.protocol.wire import VERSION, Extent, Kind, LinkMessage
from tests.transfer import version5
from tests.transfer.pair import DECODE, NUM_LAYERS, PREFILL, SOON, Outcome, Pair, kv_cache
from tests.transfer.simulation import Chances, TransferWorld
from tests.transfer.version5 import Version5

BLOCK_BYTES = 4 * 2 * 2 * 4 * 8


class OldReceiver(threading.Thread):
    """A worker of version 5 that takes one transfer: its frames, in order."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.frames: list[tuple[tuple[int, int, int], bytes]] = []
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            with self._listener, self._listener.accept()[0] as stream:
                self._serve(Version5(stream))
        except Exception as error:
            self.error = error

    def _serve(self, peer: Version5) -> None:
        hello = json.loads(peer.hear().body)
        assert hello.keys() == {"sender", "receiver", "nonce", "offers", "proof"}
        welcome = {"receiver": asdict(DECODE), "nonce": 7, "transport": "tcp", "refused": {}, "num_layers": NUM_LAYERS}
        peer.say(version5.WELCOME, {**welcome, "block_bytes": BLOCK_BYTES, "max_frame_bytes": 1 << 20, "proof": ""})
        peer.agree(PREFILL.incarnation, DECODE.incarnation, hello["nonce"], 7)
        while (message := peer.hear()).kind != version5.COMMIT:
            assert message.nonce == peer.nonce
            if message.kind == version5.PROBE:
                seen = version5.xxh3_64_intdigest(message.body).to_bytes(8, "little")
                peer.say(version5.PROBE_ACK, seen, message.handle)
            elif message.kind == version5.FRAME:
                self.frames.append((message.place, message.body))
        peer.say(version5.ACK, handle=message.handle)


def test_a_sender_of_this_version_pushes_to_a_receiver_of_the_one_before() -> None:
    source, old = kv_cache(8, seed=1), OldReceiver()
    old.start()
    sender = Sender(LocalPeer(PREFILL), transports=("tcp",))
    link = sender.open_link(DECODE, old.address, timeout_s=SOON).result(SOON)
    push = link.begin("t", first_block=0, num_blocks=2, num_layers=NUM_LAYERS, timeout_s=SOON)
    for layer, kv in enumerate(source):
        push.push(layer, 0, [4, 5], kv)
    push.commit(b"done").result(SOON)
    old.join(SOON)
    sender.close()
    assert old.error is None
    assert old.frames == [((layer, 0, 2), kv[[4, 5]].numpy().tobytes()) for layer, kv in enumerate(source)]


def test_a_sender_of_the_version_before_pushes_to_a_receiver_of_this_one() -> None:
    source, cache, outcome = kv_cache(8, seed=1), kv_cache(8), Outcome()
    receiver = Receiver(LocalPeer(DECODE), cache, host="127.0.0.1", transports=("tcp",))
    receiver.expect(
        "t", block_ids=[6, 3], first_block=0, timeout_s=SOON, on_commit=outcome.on_commit, on_abort=outcome.on_abort,
        sender=PREFILL.incarnation,
    )  # fmt: skip
    host, _, port = receiver.address.rpartition(":")
    with socket.create_connection((host, int(port))) as stream:
        peer = Version5(stream)
        hello = {"sender": asdict(PREFILL), "receiver": asdict(DECODE), "nonce": 5, "offers": {"tcp": {}}, "proof": ""}
        peer.say(version5.HELLO, hello)
        welcome = json.loads(peer.hear().body)
        peer.agree(PREFILL.incarnation, DECODE.incarnation, 5, welcome["nonce"])
        peer.say(version5.BEGIN, {"transfer_id": "t", "first_block": 0, "num_blocks": 2, "num_layers": NUM_LAYERS}, 1)
        for layer, kv in enumerate(source):
            peer.say(version5.FRAME, kv[[4, 5]].numpy().tobytes(), 1, (layer, 0, 2))
        peer.say(version5.COMMIT, b"done", 1)
        assert peer.hear().kind == version5.ACK
        assert outcome.get()[:2] == ("commit", b"done")
    receiver.close()
    assert all(torch.equal(kv[[6, 3]], sent[[4, 5]]) for kv, sent in zip(cache, source, strict=True))


def test_two_of_this_version_speak_it(pair: Pair) -> None:
    pair.moves("t", [1, 2], [3, 4])
    assert pair.link()._end._protocol._version == VERSION


@pytest.mark.parametrize(
    "extent", [Extent(group=1), Extent(num_layers=2), Extent(num_heads=1), Extent(part=0, parts=2)], ids=str
)
def test_a_frame_of_less_or_more_than_a_whole_layer_is_refused_by_name(extent: Extent) -> None:
    world = TransferWorld(1, Chances(), shm=False)
    transfer = world.start("t", [3, 4], 0)
    world.exchange(faults=False)
    assert transfer.outgoing
    frame = LinkMessage(Kind.FRAME, world.receiver._nonce, transfer.outgoing.handle, num_blocks=2, extent=extent)
    world.receiver.receive(frame, 0.0)
    world.exchange(faults=False)
    assert transfer.endings == ["abort"]
    assert transfer.outgoing.error
    assert f"{extent}: whole layers" in transfer.outgoing.error.message
