"""The float32 kernels: near float64, and a row's bits the same whatever rows, keys and threads lie beside it."""

from __future__ import annotations

import ctypes
import itertools
import math
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from structlog.testing import capture_logs
from torch import Tensor

from tandem.engine.float32 import INSTRUCTIONS, WIDER, Float32Kernels, StepRows, float32_kernels, library_path
from tandem.engine.float32.kernels import SOURCE
from tandem.engine.models import linear
from tandem.machine import native
from tests.engine.compiling import SANITIZE, check_no_warning, watched

THREADS = (1, 2, 5)
# Inputs and outputs: below, at and beside vectors, tiles, the depth of a sum and pieces of threads.
PRODUCTS = [(1, 1), (5, 3), (16, 4), (67, 33), (256, 130), (513, 70), (1200, 131)]
# Heads, KV heads, head_dim, block_size.
SHAPES = [(4, 2, 64, 16), (5, 1, 20, 3), (3, 3, 256, 16), (64, 1, 36, 1)]


@pytest.fixture(scope="module", params=[(), WIDER], ids=["AVX2", "AVX512"])
def kernels(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Float32Kernels:
    if not native.cpu_instructions().issuperset((*INSTRUCTIONS, *request.param)) or not native.compilers():
        pytest.skip("no CPU with these instructions, or no C compiler")
    cache = tmp_path_factory.getbasetemp().parent / "kernels"
    return Float32Kernels(ctypes.CDLL(str(library_path(cache, cpu={*INSTRUCTIONS, *request.param}))))


@pytest.fixture
def many_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("inputs", "outputs"), PRODUCTS)
@pytest.mark.usefixtures("many_threads")
def test_a_row_of_a_product_is_the_same_beside_any_others(kernels: Float32Kernels, inputs: int, outputs: int) -> None:
    chance = torch.Generator().manual_seed(inputs)
    x, weight, bias = (torch.randn(*size, generator=chance) for size in ((70, inputs), (outputs, inputs), (outputs,)))
    whole = kernels.linear(x, weight, bias)
    exact = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    torch.testing.assert_close(whole.double(), exact, rtol=1e-5, atol=1e-5 * math.sqrt(inputs))
    for threads, count in itertools.product(THREADS, range(1, 71)):
        torch.set_num_threads(threads)
        first = (70 - count) * threads % (71 - count)
        found = kernels.linear(x[first : first + count], weight, bias)
        assert torch.equal(found, whole[first : first + count]), (threads, first, count)


def test_rows_lie_anywhere(kernels: Float32Kernels) -> None:
    chance = torch.Generator().manual_seed(0)
    x, weight = torch.randn(9, 50, generator=chance), torch.randn(21, 50, generator=chance)
    expected = kernels.linear(x, weight, None)
    apart = torch.randn(9, 3, 50, generator=chance)
    apart[:, 1] = x
    assert torch.equal(kernels.linear(apart[:, 1], weight, None), expected)
    assert torch.equal(kernels.linear(x.t().contiguous().t(), weight, None), expected)
    assert torch.equal(kernels.linear(x, torch.cat([weight, weight], dim=1)[:, :50], None), expected)
    assert kernels.linear(x[:0], weight, None).shape == (0, 21)


def paged(k: Tensor, v: Tensor, size: int, dice: random.Random) -> tuple[Tensor, list[int]]:
    """Returns a cache with one context (tokens, kv_heads, head_dim) in scattered blocks, no number elsewhere, and its
    table."""
    tokens, kv_heads, dim = k.shape
    table = dice.sample(range(2 * tokens), -(-tokens // size))
    kv = torch.full((2 * tokens, 2, kv_heads, size, dim), math.nan)
    for token in range(tokens):
        kv[table[token // size], :, :, token % size] = torch.stack((k[token], v[token]))
    return kv, table


def attention_in_float64(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """Returns what all tokens of one context see."""
    share = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
    q, k, v = (part.double().transpose(0, 1) for part in (q, k, v))
    behind = torch.arange(q.shape[1])[:, None] - torch.arange(q.shape[1])
    seen = (behind >= 0) & (behind < (window or len(behind)))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(0, 1)


@pytest.mark.parametrize("window", [0, 1, 70])
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "size"), SHAPES)
@pytest.mark.usefixtures("many_threads")
def test_a_token_attends_the_same_beside_any_others(
    kernels: Float32Kernels, heads: int, kv_heads: int, dim: int, size: int, window: int
) -> None:
    """Compares tokens of a whole prompt with those in chunks, one by one and of several sequences in one step."""
    length, dice, chance = 200, random.Random(0), torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(length, n, dim, generator=chance) for n in (heads, kv_heads, kv_heads))
    kv, table = paged(k, v, size, dice)

    def attended(parts: Sequence[tuple[int, int]], threads: int) -> Tensor:
        """Returns what tokens first … end of contexts that end there see."""
        torch.set_num_threads(threads)
        rows = StepRows([end - first for first, end in parts], [end for _, end in parts], [table] * len(parts))
        return kernels.attend(torch.cat([q[first:end] for first, end in parts]), kv, rows, window)

    whole = attended([(0, length)], 1)
    exact = attention_in_float64(q, k, v, window)
    torch.testing.assert_close(whole.double(), exact, rtol=1e-5, atol=1e-5)
    for threads in THREADS:
        parts = [(n, n + 1) for n in (0, 199, 63, 64, 65, 127)] + [(0, 7), (60, 131), (3, 70), (150, 200)]
        dice.shuffle(parts)
        expected = torch.cat([whole[first:end] for first, end in parts])
        assert torch.equal(attended(parts, threads), expected), threads


def test_without_a_compiler_torch_computes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(native, "compilers", list)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with capture_logs() as logs:
        assert float32_kernels.__wrapped__() is None
    assert [entry["event"] for entry in logs] == ["float32 kernels are off, torch computes everything"]


@pytest.mark.usefixtures("torch_alone")
def test_torch_alone_comes_to_nearly_the_same(kernels: Float32Kernels) -> None:
    chance = torch.Generator().manual_seed(0)
    x, weight = torch.randn(9, 50, generator=chance), torch.randn(21, 50, generator=chance)
    torch.testing.assert_close(linear(x, weight), kernels.linear(x, weight, None), rtol=1e-5, atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("compiler", native.compilers(), ids=lambda command: Path(command[0]).name)
def test_the_source_compiles_without_a_warning(
    compiler: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    check_no_warning(monkeypatch, compiler, SOURCE, [INSTRUCTIONS, (*INSTRUCTIONS, *WIDER)], tmp_path)


SANITIZED = """
import ctypes, gc, pathlib, sys
gc.disable()  # imports are slow enough
from tandem.engine.float32 import Float32Kernels, library_path
from tests.engine import test_float32 as tests
for cpu in (tests.INSTRUCTIONS, (*tests.INSTRUCTIONS, *tests.WIDER)):
    if tests.native.cpu_instructions().issuperset(cpu):
        kernels = Float32Kernels(ctypes.CDLL(str(library_path(pathlib.Path(sys.argv[1]), tests.SANITIZE, {*cpu}))))
        if "wrong" in sys.argv:
            kernels._linear(bytes(1024), bytes(4096), None, bytes(4), 1, 1024, 1, 1024, 1024, 1)  # x has 256 numbers
        for sizes in tests.PRODUCTS:
            tests.test_a_row_of_a_product_is_the_same_beside_any_others(kernels, *sizes)
        for shape in tests.SHAPES:
            tests.test_a_token_attends_the_same_beside_any_others(kernels, *shape, 70)
"""


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("wrong", [False, True], ids=["as it is", "past the end"])
def test_sanitizers_find_what_is_wrong(wrong: bool, tmp_path: Path) -> None:
    gcc = shutil.which("gcc")
    if gcc is None or not native.cpu_instructions().issuperset(INSTRUCTIONS):
        pytest.skip("no CPU with AVX2, or no gcc")
    for cpu in (INSTRUCTIONS, (*INSTRUCTIONS, *WIDER)):
        library_path(tmp_path, SANITIZE, cpu={*cpu})  # here, where the compiler itself is not watched
    command = [sys.executable, "-c", SANITIZED, str(tmp_path), *["wrong"] * wrong]
    done = subprocess.run(command, env=watched(gcc), capture_output=True, encoding="utf-8", timeout=280)
    assert ("AddressSanitizer: " in done.stderr) == wrong, done.stderr[-4000:]
    assert bool(done.returncode) == wrong, done.stderr[-4000:]
