"""Peers of different wire versions refuse each other, whichever of them sends; frames hold whole layers."""

from __future__ import annotations

import socket
import struct
from threading import Thread

import pytest
from xxhash import xxh3_64_intdigest

from tandem.transfer import LocalPeer, Receiver, Sender, TransferError
from tandem.transfer.protocol.wire import HEADER_BYTES, MAGIC, VERSION, Extent, Hello, Kind, LinkMessage, control
from tests.transfer.pair import DECODE, PREFILL, SOON, kv_cache
from tests.transfer.simulation import Chances, TransferWorld

OTHERS = (VERSION - 1, VERSION + 1)


def of_version(version: int, message: LinkMessage) -> bytes:
    """Returns the message with a header that is intact, but of another version."""
    fields = bytearray(message.header()[:-8])
    fields[len(MAGIC)] = version
    return bytes(fields) + struct.pack("<Q", xxh3_64_intdigest(fields)) + bytes(message.body)


@pytest.mark.parametrize("version", OTHERS)
def test_a_receiver_hangs_up_on_a_sender_of_another_version(version: int) -> None:
    receiver = Receiver(LocalPeer(DECODE), kv_cache(8), host="127.0.0.1", transports=("tcp",))
    host, _, port = receiver.address.rpartition(":")
    hello = Hello(sender=PREFILL, receiver=DECODE, nonce=5, offers={"tcp": {}})
    for said, answer in ((version, b""), (VERSION, MAGIC)):
        with socket.create_connection((host, int(port)), timeout=SOON) as stream:
            stream.sendall(of_version(said, control(Kind.HELLO, hello.packed())))
            assert stream.recv(len(MAGIC)) == answer
    receiver.close()


@pytest.mark.parametrize("version", OTHERS)
def test_a_sender_refuses_a_receiver_of_another_version(version: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            stream, _ = listener.accept()
            with stream:
                stream.recv(HEADER_BYTES)
                stream.sendall(of_version(version, control(Kind.WELCOME, b"{}")))
                stream.recv(1 << 16)

        Thread(target=answer, daemon=True).start()
        sender = Sender(LocalPeer(PREFILL), transports=("tcp",))
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(TransferError, match=f"wire version {version}, where {VERSION} is spoken here"):
            sender.open_link(DECODE, address, timeout_s=SOON).result(SOON)
        sender.close()


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
