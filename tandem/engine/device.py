"""The device an engine computes on: chosen, checked before anything is loaded, its errors in one line each, and how a
step's inputs come to it."""

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
    """`cpu`, `cuda` or `cuda:N`, which becomes this process's. ValueError names what is wrong and what would help.

    built_for: the CUDA version of this torch.
    """
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise ValueError(f"device: {name!r} is not cpu, cuda or cuda:N")
    if name == "cpu":
        return torch.device("cpu")
    if built_for is None:
        raise ValueError(f"device: {name!r}, but torch {torch.__version__} is without CUDA: install a build with it")
    try:
        cuda.init()
    except RuntimeError as error:  # no driver, no device, or a driver that is too old: torch says which
        raise ValueError(f"device: {name!r}: {str(error).splitlines()[0]}") from None
    index, count = int(name.partition(":")[2] or 0), cuda.device_count()
    if index >= count:
        raise ValueError(f"device: {name!r}, but this machine shows {count} of them: cuda:0 to cuda:{count - 1}")
    cuda.set_device(index)
    return torch.device("cuda", index)


@contextmanager
def memory_checked(device: torch.device, cuda: Cuda = torch.cuda) -> Iterator[None]:
    """Around what is allocated at the start: ValueError where the device has no room for it."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        free, total = (f"{size / 2**30:.1f} GiB" for size in cuda.mem_get_info())
        raise ValueError(
            f"kv_memory: weights and KV cache do not fit on {device}, which has {free} of {total} free now: "
            f"lower it, or choose another device ({str(error).splitlines()[0]})"
        ) from None


def fetched(tensor: Tensor) -> Callable[[], list[int]]:
    """Begins to copy whole numbers to the host; the function waits until they are there."""
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
    """Waits until the device has done what was asked of it on the current stream."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


class Event(Protocol):
    """The part of torch.cuda.Event that is used here."""

    def record(self) -> None: ...
    def synchronize(self) -> None: ...


class Uploads:
    """Copies from memory of the host that is written anew for each step, while the device is at the step before."""

    def __init__(self, device: torch.device, event: Event | None = None) -> None:
        self._event: Event | None = event
        if event is None and device.type == "cuda":
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def done(self) -> None:
        """Waits until the last ones `begun` are: they are the first that their step asks of the device, so that is over
        soon after the step before it."""
        if self._event is not None:
            self._event.synchronize()

    def begun(self) -> None:
        if self._event is not None:
            self._event.record()


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """The same on `device`, which may still be computing: nobody waits for that."""
    return pinned(tensor, device).to(device, non_blocking=True)


def pinned(tensor: Tensor, device: torch.device) -> Tensor:
    """The same in memory from where `device` copies it whenever it comes to it."""
    return tensor.pin_memory() if device.type == "cuda" and tensor.device.type == "cpu" else tensor
