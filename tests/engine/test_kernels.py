"""The compiled CPU kernels compute what torch does, and where they cannot be had the engine goes without them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from structlog.testing import capture_logs
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from tandem.engine import Request, SamplingParams
from tandem.engine.attention import make_group, paged_attention, write_kv
from tandem.engine.kernels import CpuKernels, build, load_library
from tandem.engine.models import TorchOps
from tandem.engine.models.rope import cos_sin
from tests.engine.tiny import SIZES, VOCAB, greedy, make_engine, prompt_of, run, sampled, tokens

WIDE = SIZES | {"hidden_size": 64, "intermediate_size": 160, "head_dim": 32, "max_position_embeddings": 256}
MODELS = {
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**{**WIDE, "head_dim": 32}, tie_word_embeddings=True)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**WIDE)),
}


def load(cache: Path) -> CpuKernels | None:
    library = load_library(cache)
    return None if library is None else CpuKernels(library)


def can_compile() -> bool:
    """Asked of the machine, not of the code under test."""
    return "avx512_bf16" in Path("/proc/cpuinfo").read_text() and bool(build._compilers())


@pytest.fixture(scope="module")
def ops(tmp_path_factory: pytest.TempPathFactory) -> CpuKernels | TorchOps:
    """The kernels wherever this machine can have them; elsewhere what takes their place."""
    kernels = load(tmp_path_factory.mktemp("kernels"))
    assert (kernels is not None) == can_compile()
    return kernels or TorchOps()


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def assert_rounded(found: Tensor, exact: Tensor) -> None:
    """`found` is `exact`, rounded to bfloat16 once: half a unit in the last place, and the sums' own error."""
    torch.testing.assert_close(found.double(), exact.double(), rtol=2**-8, atol=1e-4)


@pytest.mark.parametrize("rows", [*range(1, 14), 24, 25, 37])
@pytest.mark.parametrize(("inputs", "outputs"), [(2, 32), (96, 160), (130, 64)])
def test_linear(ops: CpuKernels | TorchOps, threads: int, rows: int, inputs: int, outputs: int) -> None:
    x, weight, bias, residual = rand(rows, inputs), rand(outputs, inputs), rand(outputs), rand(rows, outputs, seed=1)
    exact = x.double() @ weight.double().T
    packed = weight.clone()
    ops.pack(packed)
    torch.testing.assert_close(ops.logits(x, packed).double(), exact, rtol=2**-8, atol=1e-4)
    if isinstance(ops, CpuKernels):
        assert_rounded(ops.linear(x, packed), exact)
        assert_rounded(ops.linear(x, packed, bias, residual), exact + bias.double() + residual.double())
        torch.testing.assert_close(ops.logits(x, packed), exact.float(), rtol=1e-5, atol=1e-4)
    ids = torch.tensor([outputs - 1, 0, 31])
    assert torch.equal(ops.embedding(ids, packed), weight[ids])


@pytest.mark.parametrize(("rows", "size"), [(1, 32), (5, 896), (70, 288)])
def test_norm_and_silu(ops: CpuKernels | TorchOps, threads: int, rows: int, size: int) -> None:
    x, weight = rand(rows, size) * 3, rand(size)
    assert_rounded(ops.rms_norm(x, weight, 1e-5), F.rms_norm(x.double(), (size,), weight.double(), 1e-5))
    gate_up = torch.cat((x * 20, rand(rows, size, seed=1)), dim=1)
    gate, up = gate_up.double().chunk(2, dim=1)
    torch.testing.assert_close(ops.silu_mul(gate_up).double(), F.silu(gate) * up, rtol=2**-6, atol=1e-3)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(14, 2, 64), (4, 4, 32), (8, 1, 128)])
def test_split_heads(
    ops: CpuKernels | TorchOps, threads: int, heads: int, kv_heads: int, head_dim: int, normed: bool
) -> None:
    qkv = rand(40, (heads + 2 * kv_heads) * head_dim)
    norms = (rand(head_dim, seed=1), rand(head_dim, seed=2)) if normed else None
    inverse = 10000.0 ** -(torch.arange(0, head_dim, 2) / head_dim)
    angles = cos_sin(inverse, torch.arange(3, 43), torch.float32)
    wide = norms and tuple(norm.float() for norm in norms)
    expected = TorchOps().split_heads(qkv.float(), (heads, kv_heads), wide, 1e-6, angles)
    angles = angles.to(ops.angle_dtype or torch.bfloat16)
    for found, exact in zip(ops.split_heads(qkv, (heads, kv_heads), norms, 1e-6, angles), expected, strict=True):
        torch.testing.assert_close(found.float(), exact, rtol=2**-6, atol=4e-2)


@pytest.mark.parametrize("block_size", [4, 16, 40])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(14, 2, 64), (4, 4, 32), (5, 1, 128), (16, 1, 32)])
def test_paged_attention(
    ops: CpuKernels | TorchOps, threads: int, block_size: int, heads: int, kv_heads: int, head_dim: int
) -> None:
    lengths = [1, block_size - 1, block_size, block_size + 1, 3 * block_size, 117]
    order, tables = torch.randperm(200, generator=torch.Generator().manual_seed(0)).tolist(), []
    for length in lengths:
        tables.append([order.pop() for _ in range(-(-length // block_size))])
    kv = torch.full((200, 2, kv_heads, block_size, head_dim), float("nan"), dtype=torch.bfloat16)
    for seed, (length, table) in enumerate(zip(lengths, tables, strict=True)):
        slots = torch.tensor([table[p // block_size] * block_size + p % block_size for p in range(length)])
        qkv = rand(length, heads + 2 * kv_heads, head_dim, seed=seed)
        k, v = qkv[:, heads : heads + kv_heads], qkv[:, heads + kv_heads :]
        (ops.write_kv if isinstance(ops, CpuKernels) else write_kv)(kv, slots, k, v)
        check = torch.zeros_like(kv)
        write_kv(check, slots, k, v)
        assert torch.equal(kv[table].nan_to_num(), check[table])
    q = rand(len(lengths), heads + 2 * kv_heads, head_dim, seed=99)[:, :heads] * 4
    wide, expected = kv.float(), torch.empty(len(lengths), heads, head_dim)
    groups = [make_group(row, 1, [tables[row]], [lengths[row]], wide) for row in range(len(lengths))]
    paged_attention(q.float(), wide, wide, wide, groups, expected)
    found = torch.empty(len(lengths), heads, head_dim, dtype=torch.bfloat16)
    if isinstance(ops, CpuKernels):
        flat = torch.tensor([block for table in tables for block in table], dtype=torch.int32)
        starts = torch.tensor([sum(map(len, tables[:n])) for n in range(len(tables))])
        ops.attention(q, kv, flat, starts, torch.tensor(lengths), found)
    else:
        paged_attention(q, kv, kv, kv, groups, found)
    torch.testing.assert_close(found.float(), expected, rtol=2**-7, atol=2e-2 if isinstance(ops, TorchOps) else 1e-3)


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.nn.Module]:
    torch.manual_seed(3)
    model, path = MODELS[request.param](), tmp_path_factory.mktemp(request.param)
    model.to(torch.bfloat16).save_pretrained(path)
    return path, model


def test_logprobs_stay_as_close_to_float32_as_transformers(
    model: tuple[Path, torch.nn.Module], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path, reference = model
    engine = make_engine(path, dtype="bfloat16")
    prompts = {str(length): prompt_of(length, length) for length in (1, 4, 15, 16, 17, 33, 50)}
    for name, prompt in prompts.items():
        engine.add(Request(name, prompt, greedy(6, logprobs=VOCAB)))
    ours = theirs = 0.0
    for name, outputs in run(engine).items():
        ids = prompts[name] + tokens(outputs)
        exact, rounded = (forward(reference, dtype, ids) for dtype in (torch.float32, torch.bfloat16))
        found = torch.stack([by_id(token.top) for token in sampled(outputs)])
        span = slice(len(prompts[name]) - 1, len(ids) - 1)
        ours, theirs = ours + float((found - exact[span]).abs().mean()), theirs + float((rounded - exact).abs().mean())
    assert ours <= 1.1 * theirs


def forward(model: torch.nn.Module, dtype: torch.dtype, ids: list[int]) -> Tensor:
    with torch.inference_mode():
        logprobs: Tensor = model.to(dtype)(torch.tensor([ids])).logits[0].float().log_softmax(-1)
    return logprobs


def by_id(top: tuple[tuple[int, float], ...]) -> Tensor:
    return torch.tensor([value for _, value in sorted(top)])


def test_a_batch_gives_everyone_what_they_get_alone(model: tuple[Path, torch.nn.Module]) -> None:
    path, _ = model
    requests = [Request(str(n), prompt_of(n, n), SamplingParams(12, temperature=1.0, seed=n)) for n in (1, 5, 8, 9, 16)]
    together, alone = make_engine(path, dtype="bfloat16"), make_engine(path, dtype="bfloat16")
    for request in requests:
        together.add(request)
    outputs = run(together)
    for request in requests:
        alone.add(request)
        assert tokens(run(alone)[request.request_id]) == tokens(outputs[request.request_id])


def test_without_a_compiler_torch_computes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(build, "_compilers", list)
    with capture_logs() as logs:
        assert load_library(tmp_path) is None
    (entry,) = logs
    assert entry["log_level"] == "warning"
    assert entry["event"] == "CPU kernels are off, torch computes everything"
    assert not list(tmp_path.glob("*.so"))


def test_a_failing_compiler_and_an_unwritable_cache_are_no_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(build, "_compilers", lambda: [["false"]])
    blocked = tmp_path / "file"
    blocked.touch()
    with capture_logs() as logs:
        assert load_library(tmp_path) is None
        assert load_library(blocked) is None
    assert len(logs) == 2
    assert list(tmp_path.iterdir()) == [blocked]


def test_concurrent_builders_leave_one_library(tmp_path: Path) -> None:
    code = "import sys, pathlib, tandem.engine.kernels as k; k.load_library(pathlib.Path(sys.argv[1]))"
    builders = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path)]) for _ in range(2)]
    assert [builder.wait(timeout=100) for builder in builders] == [0, 0]
    assert len(list(tmp_path.iterdir())) == can_compile()
