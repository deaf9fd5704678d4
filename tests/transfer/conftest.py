from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tandem.transfer.transports import TRANSPORTS
from tandem.transfer.transports.base import Transport
from tandem.transfer.transports.cuda_ipc import CudaIpcTransport
from tandem.transfer.transports.nccl import NcclTransport
from tandem.transfer.transports.nccl_communicator import thread_communicators
from tests.transfer.fake_nccl import FakeDevice, FakeNccl
from tests.transfer.fake_runtime import FakeRuntime
from tests.transfer.pair import Meet, Pair, make_pair, open_things, until
from tests.transfer.toy import ToyTransport


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Every test releases every descriptor, thread and shared memory; what a test before it left late may go too."""
    descriptors, *others = before = open_things()

    def released() -> bool:
        now, *rest = open_things()
        return now <= descriptors and rest == others

    yield
    assert until(released), f"{open_things()} after, {before} before"


@pytest.fixture(params=["shm", "tcp", "memory", "toy", "nccl", "cuda_ipc"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(autouse=True)
def transports(nothing_left: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A toy beside the real ones, and fakes of NCCL and CUDA behind the GPUs': each end has a device of its own."""
    fakes: list[FakeNccl] = []

    def nccl() -> Transport:
        fakes.append(FakeNccl(FakeDevice()))
        return NcclTransport(thread_communicators(fakes[-1], fakes[-1].device))

    def cuda_ipc() -> Transport:
        runtimes.append(FakeRuntime())
        return CudaIpcTransport(runtimes[-1], FakeDevice(driven=True, name="GPU-0"))

    runtimes: list[FakeRuntime] = []
    monkeypatch.setitem(TRANSPORTS, "toy", ToyTransport)
    monkeypatch.setitem(TRANSPORTS, "cuda_ipc", cuda_ipc)
    monkeypatch.setitem(TRANSPORTS, "nccl", nccl)
    yield
    for fake in (*fakes, *runtimes):
        fake.close()


@pytest.fixture
def meet(transports: None) -> Iterator[Meet]:
    """Makes pairs, and closes them however the test ends."""
    pairs: list[Pair] = []

    def make(*args: Any, **options: Any) -> Pair:
        pairs.append(make_pair(*args, **options))
        return pairs[-1]

    yield make
    for pair in pairs:
        pair.close()


@pytest.fixture
def pair(meet: Meet, transport: str) -> Pair:
    return meet(transport)
