"""The messages from the leader to the other ranks: a step to compute, rows whose logits are wanted.

Adapters' weights lie in shared memory of their own: the first step that needs an adapter says where.
"""

from __future__ import annotations

import os
import pickle
from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import NamedTuple
from weakref import WeakKeyDictionary, finalize

import torch
from torch import Tensor

from tandem.engine.forward import Near, StepInput
from tandem.engine.lora import Adapter, LowRank
from tandem.engine.parallel.exchange import SharedMemory

Shape = tuple[int, ...]
# Of each layer, by name: where `down` and `up` begin, and their shapes; `up` lies with its outputs first.
Places = list[dict[str, tuple[int, Shape, int, Shape]]]


class SharedAdapter(NamedTuple):
    """An adapter's weights in the file `fd` of the process `pid`."""

    number: int
    revision: str
    pid: int
    fd: int
    size: int
    dtype: torch.dtype
    places: Places


class Packed(NamedTuple):
    """A step's numbers in arrays, which are quick to pickle."""

    ids: bytes
    positions: bytes
    slots: bytes
    counts: Sequence[int]
    lengths: array[int]
    widths: array[int]
    tables: array[int]
    near: tuple[frozenset[int], bytes, array[int], array[int]] | None


@dataclass(frozen=True, slots=True)
class StepMessage:
    step: Packed
    adapters: Sequence[int | None] = ()  # by number
    new: Sequence[SharedAdapter] = ()
    gone: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class LogitsMessage:
    rows: array[int]


Message = StepMessage | LogitsMessage


def packed(message: Message) -> bytes:
    return pickle.dumps(message, pickle.HIGHEST_PROTOCOL)


def read_message(data: memoryview) -> Message:
    """Reads what the leader, a process of this worker, has written."""
    message: Message = pickle.loads(data)
    return message


@dataclass(slots=True)
class AdapterMemory:
    """The leader's side: adapters that other ranks can read."""

    _shared: WeakKeyDictionary[Adapter, SharedAdapter] = field(default_factory=WeakKeyDictionary)
    _gone: deque[int] = field(default_factory=deque)  # any thread appends to it
    _count: int = 0

    def message(self, step: StepInput) -> StepMessage:
        """Returns the message that has the other ranks compute `step`."""
        used = {adapter for adapter in step.adapters if adapter is not None}
        new = [self._share(adapter) for adapter in used if adapter not in self._shared]
        numbers = [None if adapter is None else self._shared[adapter].number for adapter in step.adapters]
        gone = [self._gone.popleft() for _ in range(len(self._gone))]
        return StepMessage(_packed(step), numbers, new, gone)

    def _share(self, adapter: Adapter) -> SharedAdapter:
        parts = [part for layer in adapter.layers for part in layer.values()]
        memory = SharedMemory.new(max(1, sum(part.down.nbytes + part.up.nbytes for part in parts)))
        dtype, places, end = parts[0].down.dtype, Places(), 0
        for layer in adapter.layers:
            places.append({})
            for name, part in layer.items():
                down, up = part.down, part.up.T
                places[-1][name] = end, tuple(down.shape), end + down.nbytes, tuple(up.shape)
                memory.tensor(end, tuple(down.shape), dtype).copy_(down)
                memory.tensor(end + down.nbytes, tuple(up.shape), dtype).copy_(up)
                end += down.nbytes + up.nbytes
        self._count += 1
        finalize(adapter, self._drop, self._count, memory)
        found = SharedAdapter(self._count, adapter.revision, os.getpid(), memory.fd, memory.size, dtype, places)
        self._shared[adapter] = found
        return found

    def _drop(self, number: int, memory: SharedMemory) -> None:
        memory.close()
        self._gone.append(number)


@dataclass(slots=True)
class AdapterViews:
    """Another rank's side: the leader's adapters, by number."""

    _found: dict[int, Adapter] = field(default_factory=dict)

    def step(self, message: StepMessage) -> StepInput:
        """Returns the step of a message."""
        for number in message.gone:
            self._found.pop(number, None)
        self._found |= {shared.number: _opened(shared) for shared in message.new}
        adapters = [None if number is None else self._found[number] for number in message.adapters]
        return replace(_unpacked(message.step), adapters=adapters)


def _opened(shared: SharedAdapter) -> Adapter:
    memory = SharedMemory.of_process(shared.pid, shared.fd, shared.size)
    memory.close()
    dtype = shared.dtype
    layers = [
        {
            name: LowRank(memory.tensor(down_at, down, dtype), memory.tensor(up_at, up, dtype).T)
            for name, (down_at, down, up_at, up) in layer.items()
        }
        for layer in shared.places
    ]
    return Adapter(shared.revision, layers)


def _packed(step: StepInput) -> Packed:
    near = None
    if (its := step.near) is not None:
        near = its.layers, _bytes(its.slots), *_flat(its.tables)
    ids, positions, slots = (_bytes(part) for part in (step.input_ids, step.positions, step.slots))
    return Packed(ids, positions, slots, list(step.counts), step.lengths, *_flat(step.tables), near)


def _unpacked(step: Packed) -> StepInput:
    near = None
    if step.near is not None:
        layers, near_slots, widths, tables = step.near
        near = Near(layers, _tensor(near_slots), _tables(widths, tables))
    ids, positions, slots = (_tensor(part) for part in (step.ids, step.positions, step.slots))
    return StepInput(
        ids, positions, slots, step.counts, step.lengths, _tables(step.widths, step.tables), near=near
    )  # fmt: skip


def _bytes(numbers: Tensor) -> bytes:
    return numbers.numpy().tobytes()


def _tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.int64) if data else torch.empty(0, dtype=torch.int64)


def _flat(tables: Iterable[Sequence[int]]) -> tuple[array[int], array[int]]:
    tables = list(tables)
    return array("i", map(len, tables)), array("i", chain.from_iterable(tables))


def _tables(widths: array[int], flat: array[int]) -> list[Sequence[int]]:
    found, end = list[Sequence[int]](), 0
    for width in widths:
        found.append(flat[end : end + width].tolist())
        end += width
    return found
