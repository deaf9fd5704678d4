"""A device that is slow to answer: torch's operations on its tensors are computed on the CPU, and it is noted where the
host of a real one would wait for it.

    with HostDevice() as device:
        kv = DeviceTensor(torch.zeros(8))      says that it is on `meta`
        kv.tolist()
    device.waits                               ["aten._to_copy.default"]

As on a GPU, all tensors of an operation are there, but for single numbers, and for what is copied or indexed with.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map

aten = torch.ops.aten
PLACE = torch.device("meta")
COPIES = {aten._to_copy.default, aten.copy_.default}
READS = {aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default, aten._unique2.default}
INDEXED = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}


class DeviceTensor(Tensor):
    """`host` is its memory."""

    host: Tensor

    @staticmethod
    def __new__(cls, host: Tensor) -> DeviceTensor:
        made: DeviceTensor = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, host.shape, strides=host.stride(), storage_offset=host.storage_offset(), dtype=host.dtype, device=PLACE
        )
        made.host = host
        return made

    def tolist(self) -> Any:  # torch has none but for tensors of its own
        return self.to("cpu").tolist()

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{function}: used outside of its HostDevice")


class HostDevice(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [value for value in tree_iter((args, kwargs)) if isinstance(value, Tensor)]
        asked = kwargs.get("device")
        made_there = any(map(_is_there, given)) if asked is None else torch.device(asked) == PLACE
        if function in COPIES:
            made_there = made_there if function is aten._to_copy.default else _is_there(args[0])
            waits = self._copy_waits(args, kwargs, made_there)
        else:
            waits = any(map(_is_there, given)) and self._waits(function, given)
        if waits:
            self.waits.append(str(function))
        if asked is not None:
            kwargs = {**kwargs, "device": torch.device("cpu")}
        found = function(*tree_map(_memory, args), **tree_map(_memory, kwargs))
        return tree_map(_put_there, found) if made_there else found

    def _copy_waits(self, args: Any, kwargs: dict[str, Any], made_there: bool) -> bool:
        source = args[1] if len(args) > 1 else args[0]
        is_asynchronous = kwargs.get("non_blocking") or len(args) > 2
        return _is_there(source) != made_there and not is_asynchronous

    def _waits(self, function: Any, given: list[Tensor]) -> bool:
        if function in INDEXED:
            return not all(map(_is_there, given)) or any(index.dtype == torch.bool for index in given[1:])
        astray = [tuple(tensor.shape) for tensor in given if not _is_there(tensor) and tensor.dim()]
        assert not astray, f"{function}: {astray} are on the host"
        return function in READS


def _is_there(tensor: Tensor) -> bool:
    return isinstance(tensor, DeviceTensor)


def _memory(value: Any) -> Any:
    return value.host if isinstance(value, DeviceTensor) else value


def _put_there(value: Any) -> Any:
    return DeviceTensor(value) if isinstance(value, Tensor) else value
