"""Padded decode steps equal plain ones, and none of their operations depends on what a step holds.

On a CPU a step is traced into its operations, which are replayed over the same memory, as those of a CUDA graph are.
"""

from __future__ import annotations

import inspect
import math
import random
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from tandem.engine.forward.attention import PagedAttention, TorchAttention
from tandem.engine.forward.decode_graphs import CudaCapture, DecodeGraphs, padded
from tandem.engine.forward.flashinfer import FlashInfer
from tandem.engine.forward.forward import StepInput, TorchForward
from tandem.engine.kv.kv_cache import row_size, write_kv
from tandem.engine.models import Decoder
from tests.engine import fake_flashinfer
from tests.engine.test_kernels import VOCAB, Sizes, fill

SHAPES = [Sizes(4, 2, 32, 4), Sizes(8, 2, 16, 16, biased=True), Sizes(2, 1, 64, 8)]
BLOCKS = 120
NOTHING = {torch.float32: math.nan, torch.int8: -1}  # the scale of a row of -1 is a NaN


class Traced:
    """A Capture: the operations that one run made, and no Python of it, run again."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        self.count += 1
        traced: Callable[[], Tensor] = make_fx(run)()
        return traced


def filled_cache(sizes: Sizes, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Every row some token's."""
    shape = (BLOCKS, 2, sizes.kv_heads, sizes.block_size, row_size(dtype, sizes.head_dim))
    k, v = torch.randn(2, BLOCKS * sizes.block_size, sizes.kv_heads, sizes.head_dim, generator=generator)
    write_kv(cache := torch.empty(shape, dtype=dtype), torch.arange(len(k)), k, v)
    return cache


def decode_step(lengths: list[int], tables: list[list[int]], size: int, dice: random.Random) -> StepInput:
    last = [length - 1 for length in lengths]
    return StepInput(
        torch.tensor([dice.randrange(VOCAB) for _ in lengths]), torch.tensor(last),
        torch.tensor([table[p // size] * size + p % size for table, p in zip(tables, last, strict=True)]),
        [1] * len(lengths), array("q", lengths), tables,
    )  # fmt: skip


def by_torch(kv: Tensor, num_heads: int) -> PagedAttention:
    return TorchAttention(kv)


def by_flashinfer(kv: Tensor, num_heads: int) -> PagedAttention:
    return FlashInfer(fake_flashinfer, kv, num_heads)


@pytest.mark.long
@pytest.mark.parametrize(
    ("sizes", "attention", "dtype"),
    [
        *((sizes, by_torch, torch.float32) for sizes in SHAPES),
        (SHAPES[0], by_torch, torch.int8),
        (SHAPES[0], by_flashinfer, torch.float32),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
@pytest.mark.usefixtures("torch_alone")  # whose operations are traced
def test_replayed_steps_equal_plain_ones_and_touch_nobody_elses_blocks(
    sizes: Sizes, attention: Callable[[Tensor, int], PagedAttention], dtype: torch.dtype, tmp_path: Path
) -> None:
    model = Decoder(sizes.config(tmp_path), torch.float32)
    fill(model, 3)
    dice, generator = random.Random(1), torch.Generator().manual_seed(1)
    start = [filled_cache(sizes, dtype, generator) for _ in model.layers]
    near = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 0.0, "atol": 1.0}  # a code is 1 beside
    plain_cache = [kv.clone() for kv in start]
    longer = [torch.cat([kv, torch.zeros_like(kv[:1])]) for kv in start]
    cache = padded([kv[:-1] for kv in longer])  # the last is the padding's
    plain, capture = TorchForward(model, plain_cache), Traced()
    static = attention(cache[0], sizes.heads)
    shapes = [shape for shape in static.shapes(9, 8, BLOCKS) if shape[0] in (1, 4, 16) and shape[1] in (2, 8)]
    with torch.no_grad():
        graphs = DecodeGraphs(TorchForward(model, [kv[:-1] for kv in longer]), model, cache, static, capture, shapes)
        assert capture.count == len(shapes)
        for count in (1, 3, 3, 4, 7, 9, 8, 3, 1):
            order = dice.sample(range(BLOCKS), BLOCKS)
            lengths = sorted(dice.randrange(1, 5 * sizes.block_size) for _ in range(count))
            tables = [[order.pop() for _ in range(-(-length // sizes.block_size))] for length in lengths]
            for kv, filled in zip((*plain_cache, *cache), start * 2, strict=True):
                kv[:BLOCKS] = filled
                for length, table in zip(lengths, tables, strict=True):  # what was never written may be anything
                    kv[table[-1], :, :, (length - 1) % sizes.block_size + 1 :] = NOTHING[dtype]
            step = decode_step(lengths, tables, sizes.block_size, dice)
            torch.testing.assert_close(graphs(step), plain(step), rtol=1e-4, atol=1e-4)
            for ours, theirs in zip(cache, plain_cache, strict=True):
                torch.testing.assert_close(ours[:-1], theirs, **near, equal_nan=True)
    assert capture.count == len(shapes), "nothing is captured while it serves"


def test_steps_that_read_push_or_fit_no_graph_go_to_the_plain_forward(tmp_path: Path) -> None:
    sizes = SHAPES[0]
    model = Decoder(sizes.config(tmp_path), torch.float32)
    fill(model, 3)
    cache = [torch.zeros(9, 2, sizes.kv_heads, sizes.block_size, sizes.head_dim) for _ in model.layers]
    plain, replayed = TorchForward(model, [kv[:-1] for kv in cache]), list[str]()

    def capture(run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        def replay() -> Tensor:
            replayed.append("graph")
            return run()

        return replay

    with torch.no_grad():
        graphs = DecodeGraphs(plain, model, cache, TorchAttention(cache[0]), capture, [(1, 2), (2, 2)])
    chunk = StepInput(
        torch.tensor([1, 2, 3]), torch.arange(3), torch.arange(3) + sizes.block_size, [3], array("q", [3]), [[1]]
    )
    written: list[int] = []
    with torch.no_grad():
        graphs(chunk)
        graphs(decode_step([4], [[1]], sizes.block_size, random.Random(1)), written.append)
        graphs(decode_step([4] * 3, [[1], [2], [3]], sizes.block_size, random.Random(1)))
        graphs(decode_step([9], [[1, 2, 3]], sizes.block_size, random.Random(1)))
        assert written == list(range(len(model.layers)))
        assert not replayed
        graphs(decode_step([4] * 2, [[1], [2]], sizes.block_size, random.Random(1)))
    assert replayed == ["graph"]


class FakeCuda:
    """torch.cuda as far as a capture uses it: notes what is asked of it."""

    def __init__(self) -> None:
        self.notes: list[object] = []

    def graph_pool_handle(self) -> str:
        return "pool"

    def Stream(self) -> FakeCuda:
        return self

    current_stream = CUDAGraph = Stream

    def wait_stream(self, stream: FakeCuda) -> None:
        self.notes.append("wait")

    @contextmanager
    def stream(self, stream: FakeCuda) -> Iterator[None]:
        self.notes.append("warm")
        yield

    @contextmanager
    def graph(self, graph: FakeCuda, **options: object) -> Iterator[None]:
        self.notes.append(options)
        yield
        self.notes.append("captured")

    def replay(self) -> None:
        self.notes.append("replay")


def test_a_capture_shares_one_pool_and_lets_other_threads_work() -> None:
    cuda = FakeCuda()
    capture = CudaCapture(cuda)

    def run() -> Tensor:
        cuda.notes.append("run")
        return torch.zeros(1)

    replays = [capture(run) for _ in range(2)]
    each = ["wait", "warm", "run", "run", "wait", {"pool": "pool", "capture_error_mode": "thread_local"}]
    assert cuda.notes == 2 * [*each, "run", "captured"]
    cuda.notes.clear()
    replays[1]()
    assert cuda.notes == ["replay"]
    assert {"cuda_graph", "pool", "capture_error_mode"} <= set(inspect.signature(torch.cuda.graph).parameters)
    assert callable(torch.cuda.graph_pool_handle)
