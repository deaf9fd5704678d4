"""Attention by FlashInfer is asked for what ours computes: plans that are right for a library with its signatures.

The library is a peer in plain torch; its signatures are compared with the real one's where that is installed, which
needs no GPU.
"""

from __future__ import annotations

import inspect
import json
import random
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tandem.engine.device import Uploads
from tandem.engine.forward.attention import TorchAttention
from tandem.engine.forward.flashinfer import FlashInfer, misfit, paged_attention_for, tried
from tandem.engine.models import Scope
from tests.engine import fake_flashinfer

BLOCKS, SIZE, HEADS, KV_HEADS, HEAD_DIM = 60, 8, 4, 2, 64
REAL = """
import inspect, json, flashinfer
found = {}
for name in ("BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper"):
    made = getattr(flashinfer, name)
    plans = [made.plan, *([made._plan_impl] if hasattr(made, "_plan_impl") else [])]
    found[name] = {
        "__init__": list(inspect.signature(made).parameters), "run": list(inspect.signature(made.run).parameters)[1:],
        "plan": [name for plan in plans for name in list(inspect.signature(plan).parameters)[1:]],
    }
reset = flashinfer.BatchDecodeWithPagedKVCacheWrapper.reset_workspace_buffer
found["BatchDecodeWithPagedKVCacheWrapper"]["reset_workspace_buffer"] = list(inspect.signature(reset).parameters)[1:]
print(json.dumps(found))
"""


def step(dice: random.Random, *, alone: bool) -> tuple[list[int], list[int], list[list[int]]]:
    """Counts, lengths and tables of sequences of which some read their first chunk, some a later one, most decode."""
    order, counts, lengths, tables = dice.sample(range(BLOCKS), BLOCKS), [], [], []
    for _ in range(dice.randrange(1, 7)):
        length = dice.randrange(1, 8 * SIZE)
        counts.append(1 if alone or dice.random() < 0.5 else dice.choice((length, dice.randrange(1, length + 1))))
        lengths.append(length)
        tables.append([order.pop() for _ in range(-(-length // SIZE))])
    return counts, lengths, tables


def written(kv: Tensor, length: int, table: list[int], generator: torch.Generator) -> Tensor:
    """A context's K and V (2, tokens, heads, head_dim), put into its blocks; what lies behind it there is no number."""
    context = torch.randn((2, length, *kv.shape[2::2]), generator=generator)
    for place, block in enumerate(table):
        kv[block] = torch.nan
        here = context[:, place * SIZE : (place + 1) * SIZE]
        kv[block, :, :, : here.shape[1]] = here.transpose(1, 2)
    return context


@pytest.mark.parametrize("alone", [True, False], ids=["decodes", "mixed"])
def test_planned_steps_equal_ours(alone: bool) -> None:
    dice, generator = random.Random(4), torch.Generator().manual_seed(4)
    for _ in range(8):
        kv = torch.zeros(BLOCKS, 2, KV_HEADS, SIZE, HEAD_DIM)
        counts, lengths, tables = step(dice, alone=alone)
        contexts = [written(kv, *each, generator) for each in zip(lengths, tables, strict=True)]
        k, v = (torch.cat([c[i, -n:] for c, n in zip(contexts, counts, strict=True)]) for i in (0, 1))
        q = torch.randn(sum(counts), HEADS, HEAD_DIM, generator=generator)
        theirs = FlashInfer(fake_flashinfer, kv, HEADS).planned(counts, lengths, tables)(q, k, v, kv, Scope())
        ours = TorchAttention(kv).planned(counts, lengths, tables)(q, k, v, kv, Scope())
        torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-5)


class LateStream:
    """Work asked of a device, in its order; nothing happens before somebody waits for it. Also an event of it."""

    def __init__(self) -> None:
        self.asked: list[Callable[[], None]] = []
        self.num_done = self.recorded = 0

    def record(self) -> None:
        self.recorded = len(self.asked)

    def synchronize(self) -> None:
        while self.num_done < self.recorded:
            self.asked[self.num_done]()
            self.num_done += 1


class Strict:
    """The library, whose wrappers copy a plan from memory that must not be written to before that has happened."""

    def __init__(self, stream: LateStream) -> None:
        for name in ("BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper"):
            setattr(self, name, self._strict(getattr(fake_flashinfer, name), stream))

    def _strict(self, made: Any, stream: LateStream) -> Any:
        class Wrapper(made):  # type: ignore[misc]
            is_copied = True

            def plan(self, *given: Any, **options: Any) -> None:
                assert self.is_copied, "a plan was written over one that is still to be copied"
                super().plan(*given, **options)
                self.is_copied = False
                stream.asked.append(self._copy)

            def _copy(self) -> None:
                self.is_copied = True

        return Wrapper


def plan_steps(uploads: Uploads, stream: LateStream) -> None:
    """Prompts, decodes, and graphs of two sizes, each step's work asked for behind its plan."""
    kv = torch.zeros(BLOCKS, 2, KV_HEADS, SIZE, HEAD_DIM)
    attention = FlashInfer(Strict(stream), kv, HEADS, uploads)
    graphs = [attention.fixed((size, 8), BLOCKS - 1) for size in (4, 2)]
    dice, steps = random.Random(5), list[Callable[[], None]]()
    for graph in graphs:
        steps.append(lambda graph=graph: graph.prepare([5, 9], [[1], [2, 3]]))  # type: ignore[misc]
    steps += [lambda alone=alone: attention.planned(*step(dice, alone=alone)) for alone in (True, False)]  # type: ignore[misc]
    for plan in dice.choices(steps, k=40):
        before = len(stream.asked)
        plan()
        assert stream.num_done <= before - 1 or before == 0, "it waits for the copy, not for the step behind it"
        stream.asked.append(lambda: None)


def test_no_plan_is_written_over_one_that_is_still_to_be_copied() -> None:
    stream = LateStream()
    plan_steps(Uploads(torch.device("cpu"), stream), stream)
    assert stream.num_done > 70
    with pytest.raises(AssertionError, match="still to be copied"):
        plan_steps(Uploads(torch.device("cpu")), LateStream())


def test_graphs_of_all_sizes_have_the_workspace_that_the_library_asks_for() -> None:
    for heads, kv_heads, head_dim in ((32, 8, 128), (64, 8, 128), (32, 4, 128), (40, 8, 128), (9, 3, 64), (32, 1, 256)):
        kv = torch.zeros(2, 2, kv_heads, SIZE, head_dim)
        attention = FlashInfer(fake_flashinfer, kv, heads)
        shapes = attention.shapes(1000, 4, 2)
        assert [rows for rows, _ in shapes] == [1, 2, 4, *range(8, 257, 8)]
        for shape in shapes:
            attention.fixed(shape, 1).prepare([3], [[0]])


def test_it_is_taken_only_for_caches_on_a_gpu_that_it_has_kernels_for() -> None:
    def cache(dtype: torch.dtype, head_dim: int) -> Tensor:
        return torch.zeros(1, 2, 1, SIZE, head_dim, dtype=dtype)

    assert isinstance(paged_attention_for(cache(torch.bfloat16, 64), HEADS), TorchAttention)
    assert misfit(cache(torch.bfloat16, 128)) == ""
    assert misfit(cache(torch.float32, 64)) == "FlashInfer has no kernel for torch.float32"
    assert misfit(cache(torch.float16, 80)) == "FlashInfer has no kernel for heads of 80"
    assert misfit(cache(torch.float16, 64), [Scope(), Scope(window=8)]).startswith("FlashInfer is used where")


def test_it_is_tried_with_prompts_and_decodes_before_a_request_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    kv = torch.zeros(BLOCKS, 2, KV_HEADS, SIZE, HEAD_DIM)
    assert isinstance(tried(fake_flashinfer, kv, HEADS), FlashInfer)
    for name in ("BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper"):

        def run(*_: object) -> Tensor:
            raise RuntimeError("Could not find nvcc")

        with monkeypatch.context() as patch:
            patch.setattr(getattr(fake_flashinfer, name), "run", run)
            with pytest.raises(RuntimeError, match="nvcc"):
                tried(fake_flashinfer, kv, HEADS)


def test_the_peer_has_the_signatures() -> None:
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", REAL], capture_output=True, encoding="utf-8", timeout=120
    )
    if "ModuleNotFoundError: No module named 'flashinfer'" in found.stderr:
        pytest.skip("needs FlashInfer: pip install 'tandem[gpu]'")
    assert found.returncode == 0, found.stderr
    for wrapper, methods in json.loads(found.stdout.splitlines()[-1]).items():
        made: Any = getattr(fake_flashinfer, wrapper)
        for name, real in methods.items():
            ours = inspect.signature(made if name == "__init__" else getattr(made, name)).parameters
            named = [n for n, p in ours.items() if n != "self" and p.kind is not p.KEYWORD_ONLY]
            assert named == real[: len(named)], (wrapper, name)
            assert {n for n, p in ours.items() if p.kind is p.KEYWORD_ONLY} <= set(real), (wrapper, name)
