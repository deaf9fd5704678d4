"""Memory of a device that another process maps: reused, mapped once, and of no use elsewhere. Over a fake runtime."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

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
        return CudaIpcTransport(made[-1], FakeDevice(driven=True))

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


def test_without_a_gpu_the_reason_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TRANSPORTS, "cuda_ipc", load_cuda_ipc)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    pair = Pair.of(("cuda_ipc", "tcp"))
    assert "no CUDA device" in pair.link().refused["cuda_ipc"]
    pair.close()
