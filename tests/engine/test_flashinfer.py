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
from typing import Any

import pytest
import torch
from torch import Tensor

from tandem.engine.forward.attention import TorchAttention
from tandem.engine.forward.flashinfer import FlashInfer, misfit, paged_attention_for, tried
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
        theirs = FlashInfer(fake_flashinfer, kv, HEADS).planned(counts, lengths, tables)(q, k, v, kv)
        ours = TorchAttention(kv).planned(counts, lengths, tables)(q, k, v, kv)
        torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-5)


def test_it_is_taken_only_for_caches_on_a_gpu_that_it_has_kernels_for() -> None:
    def cache(dtype: torch.dtype, head_dim: int) -> Tensor:
        return torch.zeros(1, 2, 1, SIZE, head_dim, dtype=dtype)

    assert isinstance(paged_attention_for(cache(torch.bfloat16, 64), HEADS), TorchAttention)
    assert misfit(cache(torch.bfloat16, 128)) == ""
    assert misfit(cache(torch.float32, 64)) == "FlashInfer has no kernel for torch.float32"
    assert misfit(cache(torch.float16, 80)) == "FlashInfer has no kernel for heads of 80"


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
    found = subprocess.run([sys.executable, "-W", "ignore", "-c", REAL], capture_output=True, text=True, timeout=120)
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
