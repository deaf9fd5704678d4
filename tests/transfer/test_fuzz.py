"""Anything at all on a KV link: the link ends, nothing is written to the cache, and the next sender is served."""

from __future__ import annotations

import socket

import torch
from hypothesis import given
from hypothesis import strategies as st

from tandem.transfer import LocalPeer, Receiver, Sender
from tandem.transfer.protocol.wire import Hello, Kind, LinkMessage, control
from tests.fuzzing import fuzzed
from tests.transfer.pair import DECODE, PREFILL, kv_cache, until

HELLO = Hello(sender=PREFILL, receiver=DECODE, nonce=1, offers={"tcp": {}}).packed()
NUMBERS = st.integers(0, 2**32 - 1)


def on_the_wire(message: LinkMessage) -> bytes:
    return message.header() + bytes(message.body)


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """A greeting, some bytes of which are others, under a header that vouches for them."""
    body = bytearray(HELLO)
    for at, byte in draw(st.lists(st.tuples(st.integers(0, len(body) - 1), st.integers(0, 255)), max_size=3)):
        body[at] = byte
    return on_the_wire(control(Kind.HELLO, bytes(body)))


FRAMES = st.builds(
    LinkMessage, st.sampled_from(list(Kind)), NUMBERS, NUMBERS, NUMBERS, NUMBERS, NUMBERS, NUMBERS, NUMBERS, NUMBERS
).map(on_the_wire)
STREAMS = st.one_of(
    st.binary(max_size=200),
    damaged(),
    st.lists(FRAMES, max_size=3).map(lambda frames: b"".join([on_the_wire(control(Kind.HELLO, HELLO)), *frames])),
)


def test_whatever_comes_over_a_link_harms_only_that_link() -> None:
    cache = kv_cache(8)
    before = [layer.clone() for layer in cache]
    receiver = Receiver(LocalPeer(DECODE), cache, host="127.0.0.1", transports=("tcp",))
    host, _, port = receiver.address.rpartition(":")

    @fuzzed(100)
    @given(STREAMS)
    def send(said: bytes) -> None:
        with socket.create_connection((host, int(port)), timeout=5.0) as stranger:
            stranger.sendall(said)

    send()
    assert until(lambda: not any(connection.alive for connection in receiver._connections))
    assert receiver.healthy
    sender = Sender(LocalPeer(PREFILL), transports=("tcp",))
    assert sender.open_link(DECODE, receiver.address, timeout_s=5.0).result(6.0).healthy
    sender.close()
    receiver.close()
    assert all(torch.equal(layer, copy) for layer, copy in zip(cache, before, strict=True))
