"""Decode steps as graphs: one token of each sequence, padded to a size that was captured, replayed from static memory.

    start   for each of the attention's shapes, the largest first ──capture──> graphs, over one pool
    step    ids | positions | slots ──one copy──> device, attend.prepare, replay ──> hidden

All are captured before the first step: a capture beside other threads' work on the device would break it or be broken.
A row of padding is a sequence of one token in a block that belongs to nobody, so it writes where nothing is read. Steps
that prefill, have adapters, push KV or fit no graph go to the plain forward. The ids of a step that is launched while
the one before it runs are on the device already.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tandem.engine.forward.attention import FixedAttend, PagedAttention, Shape
from tandem.engine.forward.forward import Forward, StepInput
from tandem.engine.forward.staged import Staged
from tandem.engine.kv import write_kv
from tandem.engine.models import Decoder, Scope

# Records a function's work on the GPU; returns a function that runs it again over the same memory.
Capture = Callable[[Callable[[], Tensor]], Callable[[], Tensor]]


class DecodeGraphs:
    """A Forward of `model`. `cache` has one block more per layer than sequences use: its last is the padding's."""

    def __init__(
        self, plain: Forward, model: Decoder, cache: list[Tensor], attention: PagedAttention, capture: Capture,
        shapes: Sequence[Shape],
    ) -> None:  # fmt: skip
        self._plain, self._model, self._cache, self._capture = plain, model, cache, capture
        self._attention = attention
        self._padding_block = len(cache[0]) - 1
        self._rows, self._widths = (sorted({shape[i] for shape in shapes}) for i in (0, 1))
        # The largest first: what the others need of the pool is there then.
        self._graphs = {shape: self.captured(shape) for shape in sorted(shapes, reverse=True)}
        self.logits, self.normed = plain.logits, plain.normed

    def __call__(self, step: StepInput, written: Callable[[int], None] | None = None) -> Tensor:
        count = len(step.counts)
        if written is not None or count != len(step.input_ids) or any(step.adapters):
            return self._plain(step, written)
        graph = self._graph_for(count, max(map(len, step.tables)))
        return self._plain(step) if graph is None else graph.run(step)

    def _graph_for(self, count: int, width: int) -> Graph | None:
        rows, columns = bisect_left(self._rows, count), bisect_left(self._widths, width)
        if rows == len(self._rows) or columns == len(self._widths):
            return None
        return self._graphs.get((self._rows[rows], self._widths[columns]))

    def captured(self, shape: Shape) -> Graph:
        """A graph for it, which whoever asks keeps."""
        size, _ = shape
        rows = torch.tensor([0, 0, self._padding_block * self._cache[0].shape[3]]).repeat_interleave(size)
        staged = Staged(rows, self._cache[0].device)
        ids, positions, slots = staged.device.view(3, size)
        attend = self._attention.fixed(shape, self._padding_block)
        attend.prepare((), ())
        context = StaticContext(self._cache, slots, attend)
        return Graph(staged, ids, attend, self._capture(lambda: self._model(ids, positions, context)))


@dataclass(frozen=True, slots=True)
class Graph:
    staged: Staged
    ids: Tensor
    attend: FixedAttend
    replay: Callable[[], Tensor]

    def run(self, step: StepInput) -> Tensor:
        """Hidden states (tokens, hidden_size)."""
        count, size = len(step.counts), len(self.ids)
        ids, positions, slots = self.staged.blank().view(3, size)
        positions[:count], slots[:count] = step.positions, step.slots
        if step.input_ids.device != self.ids.device:
            ids[:count] = step.input_ids
            self.staged.send()
        else:
            self.staged.send()
            self.ids[:count].copy_(step.input_ids)
        self.attend.prepare(step.lengths, step.tables)
        return self.replay()[:count]


@dataclass(frozen=True, slots=True)
class StaticContext:
    """The `attend` that a model gets in a graph: no shape and no branch depends on what the inputs hold."""

    cache: list[Tensor]
    slots: Tensor
    attend: FixedAttend

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scope: Scope) -> Tensor:
        kv = self.cache[layer]
        write_kv(kv, self.slots, k, v)
        return self.attend(q, kv, scope)


def padded(cache: list[Tensor]) -> list[Tensor]:
    """The same caches with the block that lies behind each."""
    return [kv.as_strided((len(kv) + 1, *kv.shape[1:]), kv.stride()) for kv in cache]


class CudaCapture:
    """Captures into CUDA graphs that share one pool: no two of them run at once, and what one has left is read before
    the next one runs. Other threads may meanwhile call what a capture forbids, for their own streams."""

    def __init__(self, cuda: Any = torch.cuda) -> None:
        self._cuda = cuda
        self._pool = self._cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """After runs on another stream that let libraries allocate what they keep."""
        stream = self._cuda.Stream()
        stream.wait_stream(self._cuda.current_stream())
        with self._cuda.stream(stream):
            for _ in range(2):
                run()
        self._cuda.current_stream().wait_stream(stream)
        graph = self._cuda.CUDAGraph()
        with self._cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            out = run()

        def replay() -> Tensor:
            graph.replay()
            return out

        return replay
