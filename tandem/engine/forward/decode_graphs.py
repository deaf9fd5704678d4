"""Decode steps as graphs: one token of each sequence, padded to a size that was captured, replayed from static memory.

    step ──write──> host: [ ids | positions | slots | lengths | tables ] ──run──> device: the same, replay ──> hidden

Rows and blocks are padded: a row to the next of SIZES, a table to a power of two. A row of padding is a sequence of one
token in a block that belongs to nobody, so it writes where nothing is read. A graph is captured when a step first needs
it; steps that prefill, have adapters or push KV go to the plain forward. The ids of a step that is launched while the
one before it runs are on the device already.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.engine.forward.attention import FixedAttend, PagedAttention
from tandem.engine.forward.forward import Forward, StepInput
from tandem.engine.kv import write_kv
from tandem.engine.models import Decoder

SIZES = (1, 2, 4, *range(8, 257, 8))

# Records a function's work on the GPU; returns a function that runs it again over the same memory.
Capture = Callable[[Callable[[], Tensor]], Callable[[], Tensor]]


class DecodeGraphs:
    """A Forward of `model`. `cache` has one block more per layer than sequences use: its last is the padding's."""

    def __init__(
        self, plain: Forward, model: Decoder, cache: list[Tensor], attention: PagedAttention, capture: Capture
    ) -> None:
        self._plain, self._model, self._cache, self._capture = plain, model, cache, capture
        self._attention = attention
        self._padding_block = len(cache[0]) - 1
        self._graphs: dict[tuple[int, int], Graph] = {}
        self.logits = plain.logits

    def __call__(self, step: StepInput, written: Callable[[int], None] | None = None) -> Tensor:
        count = len(step.counts)
        if written is not None or count != len(step.input_ids) or count > SIZES[-1] or any(step.adapters):
            return self._plain(step, written)
        key = _padded_sizes(step)
        graph = self._graphs.get(key) or self._captured(*key)
        graph.write(step)
        return graph.run(step.input_ids)[:count]

    def _captured(self, size: int, width: int) -> Graph:
        inputs = StaticInputs.of(size, width, self._padding_block, self._cache[0])
        attend = self._attention.fixed(inputs.lengths, inputs.tables)
        attend.prepare(*inputs.contexts(inputs.hosts[0]))
        context = StaticContext(self._cache, inputs, attend)
        replay = self._capture(lambda: self._model(inputs.ids, inputs.positions, context))
        graph = self._graphs[size, width] = Graph(inputs, attend, replay)
        return graph


@dataclass(frozen=True, slots=True)
class StaticInputs:
    """Views of one row of int64 on the device, and two of its like on the host, which steps are written to in turn."""

    ids: Tensor
    positions: Tensor
    slots: Tensor
    lengths: Tensor
    tables: Tensor
    device: Tensor
    hosts: tuple[Tensor, Tensor]
    padding: Tensor

    @classmethod
    def of(cls, size: int, width: int, padding_block: int, kv: Tensor) -> StaticInputs:
        slot = padding_block * kv.shape[3]
        rows = torch.tensor([0, 0, slot, 1]).repeat_interleave(size)
        padding = torch.cat([rows, torch.full((size * width,), padding_block)])
        first, second = (padding.pin_memory() if kv.is_cuda else padding.clone() for _ in range(2))
        device = padding.to(kv.device, copy=True)
        ids, positions, slots, lengths = device[: 4 * size].view(4, size)
        return cls(
            ids, positions, slots, lengths, device[4 * size :].view(size, width), device, (first, second), padding
        )

    def contexts(self, host: Tensor) -> tuple[Tensor, Tensor]:
        """Lengths and tables in one of `hosts`."""
        size, width = self.tables.shape
        return host[3 * size : 4 * size], host[4 * size :].view(size, width)


@dataclass(slots=True)
class Graph:
    inputs: StaticInputs
    attend: FixedAttend
    replay: Callable[[], Tensor]
    turn: int = 0

    def write(self, step: StepInput) -> None:
        """All but the ids, where no copy reads: that of the step before the last is over, for its tokens were read. The
        last may still be copied."""
        host, size, count = self._host.copy_(self.inputs.padding), len(self.inputs.ids), len(step.counts)
        rows, (lengths, tables) = host[: 4 * size].view(4, size), self.inputs.contexts(host)
        rows[1, :count], rows[2, :count], lengths[:count] = step.positions, step.slots, torch.tensor(step.lengths)
        tables[:count] = _rectangle(step.tables, tables.shape[1])

    def run(self, input_ids: Tensor) -> Tensor:
        """Copies what was written last to the device, in one copy, and replays the graph."""
        host, ids = self._host, self.inputs.ids
        known = input_ids.device != ids.device
        if known:
            host[: len(input_ids)] = input_ids
        self.turn = 1 - self.turn
        self.inputs.device.copy_(host, non_blocking=True)
        if not known:
            ids[: len(input_ids)].copy_(input_ids)
        self.attend.prepare(*self.inputs.contexts(host))
        return self.replay()

    @property
    def _host(self) -> Tensor:
        return self.inputs.hosts[self.turn]


@dataclass(frozen=True, slots=True)
class StaticContext:
    """The `attend` that a model gets in a graph: no shape and no branch depends on what the inputs hold."""

    cache: list[Tensor]
    inputs: StaticInputs
    attend: FixedAttend

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        kv = self.cache[layer]
        write_kv(kv, self.inputs.slots, k, v)
        return self.attend(q, kv)


def padded(cache: list[Tensor]) -> list[Tensor]:
    """The same caches with the block that lies behind each."""
    return [kv.as_strided((len(kv) + 1, *kv.shape[1:]), kv.stride()) for kv in cache]


def cuda_capture(run: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Into a CUDA graph, after runs on another stream that let libraries allocate what they keep."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()

    def replay() -> Tensor:
        graph.replay()
        return out

    return replay


def _padded_sizes(step: StepInput) -> tuple[int, int]:
    """Rows, and blocks a row, of the graph for it."""
    size = next(size for size in SIZES if size >= len(step.counts))
    return size, 1 << (max(map(len, step.tables)) - 1).bit_length()


def _rectangle(tables: Sequence[Sequence[int]], width: int) -> Tensor:
    """Each padded with its own first block, which is masked."""
    return torch.tensor([[*table, *[table[0]] * (width - len(table))] for table in tables])
