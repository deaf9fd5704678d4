"""Decode steps as graphs: one token of each sequence, padded to a size that was captured, replayed from static memory.

    start   for each of the attention's shapes, the largest first ──capture──> graphs, over one pool
    step    ids | positions | slots | slots of windows ──one copy──> device, attend.prepare, replay ──> hidden

All graphs are captured before the first step, for a capture and other threads' work on the device would break each
other. A padding row is a sequence of one token in a block of no sequence, so no step reads what it writes. Steps that
prefill, have adapters, push KV or fit no graph go to the plain forward. The token ids of a step that is launched while
the step before runs are on the device already.
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

# Records a function's work on the GPU; returns a function that replays the work over the same memory.
Capture = Callable[[Callable[[], Tensor]], Callable[[], Tensor]]


class DecodeGraphs:
    """A Forward of `model`. Each layer of `cache` has one more block than sequences use: the last is the padding's.

    near_layers: the layers that take slots and tables from `StepInput.near`.
    """

    def __init__(
        self, plain: Forward, model: Decoder, cache: list[Tensor], attention: PagedAttention, capture: Capture,
        shapes: Sequence[Shape], near_layers: frozenset[int] = frozenset(),
    ) -> None:  # fmt: skip
        self._plain, self._model, self._cache, self._capture = plain, model, cache, capture
        self._attention, self._near_layers = attention, near_layers
        # The padding's blocks: of layers that see all tokens, and of those with a window.
        of_layers = {layer in near_layers: len(kv) - 1 for layer, kv in enumerate(cache)}
        self._padding = of_layers.get(False, 0), of_layers.get(True, 0)
        self._rows, self._widths = (sorted({shape[i] for shape in shapes}) for i in (0, 1))
        # Capture the largest shape first: the pool then has all the memory that the others need.
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
        """Captures and returns a graph of this shape; the caller must keep it."""
        size, _ = shape
        block_size = self._cache[0].shape[3]
        rows = torch.tensor([0, 0, *(block * block_size for block in self._padding)]).repeat_interleave(size)
        staged = Staged(rows, self._cache[0].device)
        ids, positions, *slots = staged.device.view(4, size)
        attends = [self._attention.fixed(shape, block) for block in self._padding[: 1 + bool(self._near_layers)]]
        for attend in attends:
            attend.prepare((), ())
        context = StaticContext(self._cache, slots, attends, self._near_layers)
        return Graph(staged, ids, attends, self._capture(lambda: self._model(ids, positions, context)))


@dataclass(frozen=True, slots=True)
class Graph:
    staged: Staged
    ids: Tensor
    attends: Sequence[FixedAttend]
    replay: Callable[[], Tensor]

    def run(self, step: StepInput) -> Tensor:
        """Replays the graph for `step` and returns its hidden states (tokens, hidden_size)."""
        count, size = len(step.counts), len(self.ids)
        ids, positions, slots, near = self.staged.blank().view(4, size)
        positions[:count], slots[:count] = step.positions, step.slots
        if step.near is not None:
            near[:count] = step.near.slots
        if step.input_ids.device != self.ids.device:
            ids[:count] = step.input_ids
            self.staged.send()
        else:
            self.staged.send()
            self.ids[:count].copy_(step.input_ids)
        self.attends[0].prepare(step.lengths, step.tables)
        if step.near is not None:
            self.attends[1].prepare(step.lengths, step.near.tables)
        return self.replay()[:count]


@dataclass(frozen=True, slots=True)
class StaticContext:
    """The `attend` that a model gets in a graph: no shape and no branch depends on what the inputs hold."""

    cache: list[Tensor]
    slots: Sequence[Tensor]
    attends: Sequence[FixedAttend]
    near_layers: frozenset[int]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scope: Scope) -> Tensor:
        kv, is_near = self.cache[layer], layer in self.near_layers
        write_kv(kv, self.slots[is_near], k, v)
        return self.attends[is_near](q, kv, scope)


def padded(cache: list[Tensor]) -> list[Tensor]:
    """Returns views of the caches that include the extra block after each."""
    return [kv.as_strided((len(kv) + 1, *kv.shape[1:]), kv.stride()) for kv in cache]


class CudaCapture:
    """Captures CUDA graphs that share one memory pool: no two graphs run at once, and a graph's output is read before
    the next graph runs. Other threads may meanwhile call what a capture forbids, on their own streams."""

    def __init__(self, cuda: Any = torch.cuda) -> None:
        self._cuda = cuda
        self._pool = self._cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Captures `run` and returns its replay.

        Runs it twice before, so that libraries allocate their lasting memory.
        """
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
