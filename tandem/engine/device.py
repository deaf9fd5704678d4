"""The device an engine computes on: choosing and checking it before anything is loaded, and uploading a step's inputs
to it. Its errors are one line each."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor


class Cuda(Protocol):
    """The part of torch.cuda that is used here."""

    def init(self) -> None: ...
    def device_count(self) -> int: ...
    def set_device(self, device: int) -> None: ...
    def mem_get_info(self) -> tuple[int, int]: ...


def open_device(name: str, cuda: Cuda = torch.cuda, built_for: str | None = torch.version.cuda) -> torch.device:
    """Returns the device `cpu`, `cuda` or `cuda:N`; a GPU becomes this process's current one.

    built_for: the CUDA version of this torch. Raises ValueError naming what is wrong and what would help.
    """
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise ValueError(f"device: {name!r} is not cpu, cuda or cuda:N")
    if name == "cpu":
        return torch.device("cpu")
    if built_for is None:
        raise ValueError(f"device: {name!r}, but torch {torch.__version__} is without CUDA: install a build with it")
    try:
        cuda.init()
    except RuntimeError as error:  # no driver, no device or too old a driver: torch's message names which
        raise ValueError(f"device: {name!r}: {str(error).splitlines()[0]}") from None
    index, count = int(name.partition(":")[2] or 0), cuda.device_count()
    if index >= count:
        raise ValueError(f"device: {name!r}, but this machine shows {count} of them: cuda:0 to cuda:{count - 1}")
    cuda.set_device(index)
    return torch.device("cuda", index)


@contextmanager
def memory_checked(device: torch.device, cuda: Cuda = torch.cuda) -> Iterator[None]:
    """Wraps the allocations at start-up. Raises ValueError if they do not fit into the device's memory."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        free, total = (f"{size / 2**30:.1f} GiB" for size in cuda.mem_get_info())
        raise ValueError(
            f"kv_memory: weights and KV cache do not fit on {device}, which has {free} of {total} free now: "
            f"lower it, or choose another device ({str(error).splitlines()[0]})"
        ) from None


def fetched(tensor: Tensor) -> Callable[[], list[int]]:
    """Begins to copy integers to the host and returns a function that waits for the copy and returns them."""
    if tensor.device.type != "cuda":
        return tensor.tolist
    there = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    there.copy_(tensor, non_blocking=True)
    event = torch.cuda.current_stream(tensor.device).record_event()

    def read() -> list[int]:
        event.synchronize()
        numbers: list[int] = there.tolist()
        return numbers

    return read


def settle(device: torch.device) -> None:
    """Waits until the device has finished all work on the current stream."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


class Event(Protocol):
    """The part of torch.cuda.Event that is used here."""

    def record(self) -> None: ...
    def synchronize(self) -> None: ...


class Uploads:
    """Guards host memory that every step overwrites: the device may still be copying the previous step's from it."""

    def __init__(self, device: torch.device, event: Event | None = None) -> None:
        self._event: Event | None = event
        if event is None and device.type == "cuda":
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def done(self) -> None:
        """Waits until the copies marked by the last `begun` have finished, so that their memory may be written again.

        Copies are the first work of their step, so this wait ends soon after the previous step does.
        """
        if self._event is not None:
            self._event.synchronize()

    def begun(self) -> None:
        if self._event is not None:
            self._event.record()


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """Copies `tensor` to `device` without waiting for work that the device still has to finish."""
    return pinned(tensor, device).to(device, non_blocking=True)


def pinned(tensor: Tensor, device: torch.device) -> Tensor:
    """Returns `tensor` in pinned memory if `device` is a GPU, so that the GPU can copy it while the host goes on."""
    return tensor.pin_memory() if device.type == "cuda" and tensor.device.type == "cpu" else tensor
