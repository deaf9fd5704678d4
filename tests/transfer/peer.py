"""Workers in processes of their own, to be killed and frozen."""

from __future__ import annotations

import threading
from collections.abc import Callable
from multiprocessing.connection import Connection

from tandem.transfer import LocalPeer, Receiver, Sender
from tandem.transfer.transports import TRANSPORTS
from tandem.transfer.transports.cuda_ipc import CudaIpcTransport
from tandem.transfer.transports.nccl import NcclTransport
from tandem.transfer.transports.nccl_communicator import thread_communicators
from tests.transfer.fake_nccl import FakeDevice, FakeNccl
from tests.transfer.fake_runtime import FakeRuntime
from tests.transfer.pair import DECODE, NUM_LAYERS, PREFILL, SOON, Outcome, kv_cache


def fake_transport() -> NcclTransport:
    fake = FakeNccl(FakeDevice())
    return NcclTransport(thread_communicators(fake, fake.device))


def fake_gpus() -> None:
    """In this process, for the transports of GPUs."""
    TRANSPORTS["nccl"] = fake_transport
    TRANSPORTS["cuda_ipc"] = lambda: CudaIpcTransport(FakeRuntime(), FakeDevice(driven=True, name="GPU-0"))


def send_one_layer(pipe: Connection, transport: str, address: str) -> None:
    """A prefill worker that is one layer into transfer "t" when it says so."""
    fake_gpus()
    source = kv_cache(32, seed=1)
    sender = Sender(LocalPeer(PREFILL), transports=(transport,))
    link = sender.open_link(DECODE, address, timeout_s=SOON).result(SOON)
    push = link.begin("t", first_block=0, num_blocks=2, num_layers=NUM_LAYERS, timeout_s=60)
    push.push(0, 0, [4, 5], source[0])
    link.probe(64, timeout_s=SOON).result(SOON)  # the receiver has read what came before
    pipe.send("pushed")
    pipe.poll(60)


def receive(pipe: Connection, transport: str, _address: str) -> None:
    """A decode worker that expects transfer "t"."""
    fake_gpus()
    receiver = Receiver(LocalPeer(DECODE), kv_cache(48), host="127.0.0.1", transports=(transport,))
    outcome = Outcome()
    receiver.expect(
        "t", block_ids=[1, 2], first_block=0, timeout_s=60,
        on_commit=outcome.on_commit, on_abort=outcome.on_abort,
    )  # fmt: skip
    pipe.send(receiver.address)
    pipe.poll(60)


Role = Callable[[Connection, str, str], None]


def warm() -> int:
    """Something to run in the fork server's first child, so that its own descriptors are open before a test counts."""
    return threading.active_count()
