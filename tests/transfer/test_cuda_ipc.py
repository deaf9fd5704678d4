"""Memory of a device that another process maps: reused, mapped once, and of no use elsewhere. Over a fake runtime."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tandem.transfer.transports import TRANSPORTS
from tandem.transfer.transports.cuda_ipc import CudaIpcTransport, load_cuda_ipc
from tests.transfer.fake_nccl import FakeDevice
from tests.transfer.fake_runtime import FakeRuntime
from tests.transfer.pair import DECODE, Pair, until


@pytest.fixture
def runtimes(transports: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[FakeRuntime]]:
    """A pair's sender makes the first."""
    made: list[FakeRuntime] = []

    def transport() -> CudaIpcTransport:
        made.append(FakeRuntime())
        return CudaIpcTransport(made[-1], FakeDevice(driven=True, name="GPU-0"))

    monkeypatch.setitem(TRANSPORTS, "cuda_ipc", transport)
    yield made
    for runtime in made:
        runtime.close()


def test_memory_serves_one_link_after_another_and_is_unmapped_with_its_link(runtimes: list[FakeRuntime]) -> None:
    pair = Pair.of(("cuda_ipc", "tcp"))
    for here in ([4, 5], [6, 7], [8, 9]):
        assert pair.link().transport == "cuda_ipc"
        pair.moves("t", [1, 2], here)
        pair.sender.close_link(DECODE.worker_id, DECODE.incarnation)
        assert until(lambda: not runtimes[1].mapped)
    assert len(runtimes[0].allocated) == 1
    pair.close()


def test_memory_that_cannot_be_mapped_or_made_is_named(runtimes: list[FakeRuntime]) -> None:
    pair = Pair.of(("cuda_ipc", "tcp"))

    def refuse(*_what: object) -> int:
        raise RuntimeError("cudaErrorMapBufferObjectFailed")

    runtimes[1].ipcOpenMemHandle = refuse  # type: ignore[method-assign]
    assert pair.link().refused == {"cuda_ipc": "the sender's memory cannot be mapped: cudaErrorMapBufferObjectFailed"}
    assert pair.link().transport == "tcp"
    pair.sender.close_link(DECODE.worker_id, DECODE.incarnation)
    runtimes[0].malloc = runtimes[0].ipcGetMemHandle = refuse  # type: ignore[assignment, method-assign]
    assert "no memory on the device to send from" in pair.link().refused["cuda_ipc"]
    pair.moves("t", [1], [2])
    pair.close()


def test_between_two_gpus_it_is_refused_by_their_names(runtimes: list[FakeRuntime]) -> None:
    pair = Pair.of(("cuda_ipc", "tcp"))
    for end, name in (pair.sender, "GPU-3"), (pair.receiver, "GPU-5"):
        transport = end._transports[0]
        assert isinstance(transport, CudaIpcTransport)
        transport.device = FakeDevice(driven=True, name=name)
    why = "the sender's memory is on GPU GPU-3, this is GPU GPU-5: between two there is nccl"
    assert pair.link().refused == {"cuda_ipc": why}
    pair.moves("t", [1], [2])
    pair.close()


class CopyingDevice(FakeDevice):
    """As torch does with memory of a device that is not the one asked for."""

    def view(self, pointer: int, size: int) -> torch.Tensor:
        return super().view(pointer, size).clone()


def test_a_view_that_is_a_copy_is_never_read(runtimes: list[FakeRuntime]) -> None:
    pair = Pair.of(("cuda_ipc", "tcp"))
    receiving = pair.receiver._transports[0]
    assert isinstance(receiving, CudaIpcTransport)
    receiving.device = CopyingDevice(driven=True, name="GPU-0")
    assert "torch sees a copy of it" in pair.link().refused["cuda_ipc"]
    assert not runtimes[1].mapped
    pair.close()


def test_without_a_gpu_the_reason_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TRANSPORTS, "cuda_ipc", load_cuda_ipc)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    pair = Pair.of(("cuda_ipc", "tcp"))
    assert "no CUDA device" in pair.link().refused["cuda_ipc"]
    pair.close()
