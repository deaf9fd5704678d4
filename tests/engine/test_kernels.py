"""The compiled CPU kernels compute what torch does, and where they cannot be had the engine goes without them."""

from __future__ import annotations

import ctypes
import math
import random
import shutil
import subprocess
import sys
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, make_dataclass, replace
from pathlib import Path

import pytest
import torch
from structlog.testing import capture_logs
from torch import Tensor
from transformers import (
    LlamaConfig,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tandem.engine import Request, SamplingParams
from tandem.engine.forward.forward import StepInput, TorchForward
from tandem.engine.kernels import AMX, CpuForward, load_library
from tandem.engine.kernels.build import INSTRUCTIONS, SOURCE, library_path
from tandem.engine.kernels.packed import SCALE_TYPES, PackedWeight
from tandem.engine.kv.kv_cache import opened, row_size, write_kv
from tandem.engine.models import Decoder, ModelConfig, read_model_config, rms_norm
from tandem.engine.quantization.quantization import QuantizedWeight, quantize
from tandem.machine import native
from tests.engine.compiling import SANITIZE, check_no_warning, watched
from tests.engine.tiny import SIZES, VOCAB, can_compile, greedy, make_engine, prompt_of, run, sampled, tokens

WIDE = SIZES | {"hidden_size": 64, "intermediate_size": 160, "head_dim": 32, "max_position_embeddings": 256}
MODELS = {
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**{**WIDE, "head_dim": 32}, tie_word_embeddings=True)),
    "phi3": lambda: Phi3ForCausalLM(Phi3Config(**{**WIDE, "num_attention_heads": 2, "num_key_value_heads": 1})),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**WIDE)),
}


@dataclass(frozen=True)
class Sizes:
    heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    biased: bool = False
    intermediate: int = 160

    def config(self, folder: Path) -> ModelConfig:
        given = WIDE | {
            "num_attention_heads": self.heads, "num_key_value_heads": self.kv_heads, "head_dim": self.head_dim,
            "max_position_embeddings": 512, "intermediate_size": self.intermediate,
        }  # fmt: skip
        biased = {"attention_bias": True, "mlp_bias": True, "architectures": ["LlamaForCausalLM"]}
        plain = {"architectures": ["Qwen3ForCausalLM"]}
        made = LlamaConfig(**given, **biased) if self.biased else Qwen3Config(**given, **plain)
        made.save_pretrained(folder)
        return read_model_config(folder, None)


SHAPES = [
    Sizes(4, 2, 32, 4), Sizes(14, 2, 64, 16), Sizes(4, 4, 32, 7, biased=True), Sizes(5, 1, 128, 40),
    Sizes(16, 1, 32, 16), Sizes(2, 1, 256, 16, biased=True), Sizes(3, 1, 64, 16), Sizes(4, 1, 32, 5),
    Sizes(4, 2, 32, 16, intermediate=4112),
]  # fmt: skip
# Tokens of each of four sequences, step after step: chunks and single tokens mixed, over tiles' and key blocks' edges.
STEPS = [(1, 5, 13, 64), (1, 1, 1, 1), (1, 7, 65, 100), (1, 1, 1, 130), (1, 1, 1, 20), (0, 0, 0, 1), (25, 24, 37, 12)]


def fill(model: Decoder, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in model.checkpoint_tensors().items():
        values = torch.randn(tensor.shape, generator=generator) * 0.1 + ("norm" in name)
        tensor.copy_(values.bfloat16())


def steps(sizes: Sizes, tables: list[list[int]]) -> Iterator[StepInput]:
    """Each of STEPS as the runner would put it, single tokens first."""
    done, dice, size = [0] * len(tables), random.Random(1), sizes.block_size
    for asked in STEPS:
        row = sorted((i for i, n in enumerate(asked) if n), key=lambda i: asked[i] > 1)
        places = [(i, p) for i in row for p in range(done[i], done[i] + asked[i])]
        done = [n + more for n, more in zip(done, asked, strict=True)]
        yield StepInput(
            torch.tensor([dice.randrange(VOCAB) for _ in places]),
            torch.tensor([p for _, p in places]),
            torch.tensor([tables[i][p // size] * size + p % size for i, p in places]),
            [asked[i] for i in row], array("q", [done[i] for i in row]), [tables[i] for i in row],
        )  # fmt: skip


PASSES = [
    (1, "none", 0),
    (2, "none", 0),
    (3, "none", 0),
    (2, "int8", 0),
    (3, "int4", 0),
    (2, "none", 8),
    (2, "ordered", 0),
    (2, "exact", 0),
]


def quantize_model(model: Decoder, quantization: str) -> None:
    """`ordered`: int4 with inputs in another order; `exact`: with scales that bfloat16 does not hold."""
    model.quantize("int4" if quantization in ("ordered", "exact") else quantization)
    for number, (linear, _, _) in enumerate(model.fused()):
        assert isinstance(linear.weight, QuantizedWeight)
        if quantization == "ordered":
            order = torch.randperm(linear.weight.shape[1], generator=torch.Generator().manual_seed(number))
            linear.weight = replace(linear.weight, order=order)
        elif quantization == "exact":
            linear.weight = as_checkpoints_have_it(linear.weight, SCALE_TYPES[1 + number % 2])


@pytest.mark.parametrize(("threads", "quantization", "kv_bits"), PASSES)
@pytest.mark.parametrize("sizes", SHAPES, ids=str)
def test_a_pass_computes_what_torch_does(
    library: ctypes.CDLL, sizes: Sizes, threads: int, quantization: str, kv_bits: int, tmp_path: Path
) -> None:
    """Hidden states, logits and the cache itself beside float32, on contexts in scattered blocks of a dirty cache."""
    config = sizes.config(tmp_path)
    rounded, exact = Decoder(config, torch.bfloat16), Decoder(config, torch.float32)
    fill(rounded, 3)
    fill(exact, 3)
    if quantization != "none":
        quantize_model(rounded, quantization)
        quantize_model(exact, quantization)
    dtypes = (torch.int8, torch.int8) if kv_bits else (torch.bfloat16, torch.float32)
    shape = (200, 2, sizes.kv_heads, sizes.block_size, row_size(dtypes[0], sizes.head_dim))
    caches = [[torch.zeros(shape, dtype=dtype) for _ in exact.layers] for dtype in dtypes]
    expected = TorchForward(exact, caches[1])
    assert not CpuForward.misfit(config)
    tolerance = 0.03 if quantization != "none" or kv_bits else 0.02  # such numbers are rounded, too
    for kv in caches[0]:
        kv.fill_(-1 if kv_bits else math.nan)  # as bytes, -1 is a bfloat16 that is not a number
    found = CpuForward(library, rounded, caches[0], 512, lambda: threads)
    order = random.Random(0).sample(range(200), 200)
    lengths = map(sum, zip(*STEPS, strict=True))
    tables = [[order.pop() for _ in range(-(-length // sizes.block_size))] for length in lengths]
    written: list[int] = []
    for number, step in enumerate(steps(sizes, tables)):
        with torch.inference_mode():
            ours, theirs = found(step, written.append if number % 2 else None), expected(step)
            rows = [0, len(step.input_ids) - 1]
            for a, b in ((ours, theirs), (found.logits(ours, rows), expected.logits(theirs, rows))):
                assert float((a.float() - b).abs().max()) < tolerance * float(b.abs().max())
    assert written == list(range(len(exact.layers))) * (len(STEPS) // 2)
    used = [block for table in tables for block in table]
    for ours, theirs in zip(*caches, strict=True):
        ours, theirs = (opened(kv[used], torch.float32).float().nan_to_num() for kv in (ours, theirs))
        torch.testing.assert_close(ours, theirs, rtol=0.05, atol=0.1)


def test_int8_rows_are_the_bytes_that_torch_writes(library: ctypes.CDLL, tmp_path: Path) -> None:
    """Compares the first layer, whose K and V are the same whatever the cache is in."""
    sizes = SHAPES[1]
    config, caches = sizes.config(tmp_path), []
    for dtype in (torch.bfloat16, torch.int8):
        model = Decoder(config, torch.bfloat16)
        fill(model, 3)
        shape = (40, 2, sizes.kv_heads, sizes.block_size, row_size(dtype, sizes.head_dim))
        cache = [torch.zeros(shape, dtype=dtype) for _ in model.layers]
        forward = CpuForward(library, model, cache, 512, lambda: 2)
        tables = [[4 * i + n for n in range(4)] for i in range(4)]
        with torch.inference_mode():
            forward(next(steps(sizes, tables)))
        caches.append(cache[0])
    slots = torch.arange(16 * 16)
    k, v = (caches[0][:16, which].transpose(1, 2).flatten(0, 1) for which in (0, 1))
    expected = torch.zeros_like(caches[1])
    write_kv(expected, slots, k, v)
    written = caches[0][:16].any(dim=-1)
    assert written.sum() == 2 * sizes.kv_heads * (1 + 5 + 13 + 64)
    assert torch.equal(caches[1][:16][written], expected[:16][written])


@pytest.mark.parametrize("halves", [False, True])
def test_a_packed_weight_is_what_it_was(library: ctypes.CDLL, halves: bool) -> None:
    """Also with exponents too many for a panel: denormals, both zeros, infinities, everything bfloat16 has."""
    chance = torch.Generator().manual_seed(1)
    weight = (0.02 * torch.randn(128, 96, generator=chance)).bfloat16()
    weight[40:44] = torch.randint(-(2**15), 2**15, (4, 96), generator=chance, dtype=torch.int16).view(torch.bfloat16)
    weight[70] = 0.0
    weight[71, ::2], weight[72, 5], weight[73, 6] = -0.0, math.inf, 1e-40
    found, ids = torch.empty_like(weight), torch.randperm(128, generator=chance)
    packed = PackedWeight(library, weight, halves)
    library.tandem_unpack_rows(ctypes.byref(packed.struct), ids.data_ptr(), 128, found.data_ptr())
    expected = weight
    if halves:  # a panel is 16 outputs of either half
        expected = weight.view(2, 4, 16, 96).transpose(0, 1).reshape(128, 96)
    assert torch.equal(found.view(torch.int16), expected[ids].view(torch.int16))


@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize(("method", "inputs"), [("int8", 96), ("int4", 192), ("int4", 48)])
def test_a_quantized_weight_is_read_as_torch_reads_it(
    library: ctypes.CDLL, method: str, inputs: int, halves: bool
) -> None:
    chance = torch.Generator().manual_seed(1)
    weight = quantize(0.02 * torch.randn(128, inputs, generator=chance), method)
    found, ids = torch.empty(128, inputs, dtype=torch.bfloat16), torch.randperm(128, generator=chance)
    packed = PackedWeight(library, weight, halves)
    library.tandem_unpack_rows(ctypes.byref(packed.struct), ids.data_ptr(), 128, found.data_ptr())
    expected = weight.dense(torch.bfloat16)
    if halves:
        expected = expected.view(2, 4, 16, inputs).transpose(0, 1).reshape(128, inputs)
    torch.testing.assert_close(found, expected[ids], rtol=2**-8, atol=0)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("scale_type", SCALE_TYPES, ids=str)
def test_scales_and_offsets_stay_what_the_checkpoint_says(
    library: ctypes.CDLL, scale_type: torch.dtype, bits: int
) -> None:
    """Rounded to 8 bits, an offset would move a whole group of numbers by a part of its smallest one."""
    chance = torch.Generator().manual_seed(1)
    codes = torch.randint(2**bits, (64, 96), generator=chance, dtype=torch.uint8)
    scales = 0.001 + 0.001 * torch.rand(64, 3, generator=chance)
    weight = as_checkpoints_have_it(QuantizedWeight(codes, scales, -(2**bits - 1) / 2 * scales, bits), scale_type)
    packed, ids, found = PackedWeight(library, weight), torch.arange(64), torch.empty(64, 96, dtype=torch.bfloat16)
    assert SCALE_TYPES[packed.struct.scale_type] == scale_type
    library.tandem_unpack_rows(ctypes.byref(packed.struct), ids.data_ptr(), 64, found.data_ptr())
    torch.testing.assert_close(found.float(), weight.dense(torch.float32), rtol=2**-8, atol=1e-7)


def as_checkpoints_have_it(weight: QuantizedWeight, scale_type: torch.dtype) -> QuantizedWeight:
    """With scales and offsets that no narrower type holds, as they are read: in float32."""
    scales, offsets = (part.float() * 1.0007 for part in (weight.scales, weight.offsets))
    return replace(weight, scales=scales.to(scale_type).float(), offsets=offsets.to(scale_type).float())


@pytest.mark.parametrize("threads", [1, 2])
def test_rare_numbers_count_as_all_others(library: ctypes.CDLL, threads: int, tmp_path: Path) -> None:
    config = SHAPES[1].config(tmp_path)
    model = Decoder(config, torch.bfloat16)
    fill(model, 5)
    scattered = torch.rand(model.embed.shape, generator=torch.Generator().manual_seed(2)) < 0.05
    model.embed[scattered] *= 2.0**-18
    model.embed[::7, ::5] = 3.0
    hidden = torch.randn(30, config.hidden_size, generator=torch.Generator().manual_seed(0)).bfloat16()
    normed = rms_norm(hidden.double(), model.norm.double(), config.rms_norm_eps).bfloat16().double()
    exact = (normed @ model.lm_head.double().T).float()
    cache = [torch.zeros(4, 2, 2, 16, 64, dtype=torch.bfloat16) for _ in model.layers]
    made = CpuForward(library, model, cache, 64, lambda: threads)
    for count in (1, 13, 30):
        torch.testing.assert_close(made.logits(hidden, range(count)), exact[:count], rtol=2**-7, atol=2e-2)


@pytest.mark.parametrize("threads", [1, 2])
def test_any_number_of_rows_gives_each_what_it_gets_alone(library: ctypes.CDLL, threads: int, tmp_path: Path) -> None:
    config = SHAPES[1].config(tmp_path)
    model = Decoder(config, torch.bfloat16)
    fill(model, 5)
    hidden = torch.randn(40, config.hidden_size, generator=torch.Generator().manual_seed(0)).bfloat16()
    normed = rms_norm(hidden.double(), model.norm.double(), config.rms_norm_eps).bfloat16().double()
    exact = (normed @ model.lm_head.double().T).float()
    cache = [torch.zeros(4, 2, 2, 16, 64, dtype=torch.bfloat16) for _ in model.layers]
    made = CpuForward(library, model, cache, 64, lambda: threads)
    for count in (*range(1, 14), 24, 25, 37):
        rows = list(range(40 - count, 40))
        torch.testing.assert_close(made.logits(hidden, rows), exact[rows], rtol=2**-7, atol=2e-2)
        assert torch.equal(made.logits(hidden, rows)[-1:], made.logits(hidden, [39]))


def test_a_pass_of_little_work_wakes_no_other_thread(library: ctypes.CDLL, tmp_path: Path) -> None:
    config = SHAPES[1].config(tmp_path)
    model = Decoder(config, torch.bfloat16)
    fill(model, 5)
    cache = [torch.zeros(4, 2, 2, 16, 64, dtype=torch.bfloat16) for _ in model.layers]
    asked: list[int] = []

    def num_threads() -> int:
        asked.append(2)
        return 2

    made = CpuForward(library, model, cache, 64, num_threads, least_work=2 * config.multiplications)
    for rows, times in ((1, 0), (2, 1)):
        asked.clear()
        at = torch.arange(rows)
        made(StepInput(at, at, at, [rows], array("q", [rows]), [[0]]))
        assert len(asked) == times


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


def test_an_operation_that_the_kernels_do_not_know_is_left_to_torch(tmp_path: Path) -> None:
    config = SHAPES[0].config(tmp_path)
    grown = make_dataclass("Grown", [("logit_softcap", float, 0.0)], bases=(ModelConfig,), frozen=True)
    given = {field.name: getattr(config, field.name) for field in fields(config)}
    assert CpuForward.misfit(grown(**given)) == ""
    assert CpuForward.misfit(grown(**given, logit_softcap=30.0)) == "they do not know logit_softcap"
    assert "multiples of 32" in CpuForward.misfit(replace(config, intermediate_size=40))


@pytest.mark.long
@pytest.mark.parametrize("compiler", native.compilers(), ids=lambda command: Path(command[0]).name)
def test_the_source_compiles_without_a_warning(
    compiler: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    check_no_warning(monkeypatch, compiler, SOURCE, [INSTRUCTIONS, (*INSTRUCTIONS, *AMX)], tmp_path)


SANITIZED = """
import ctypes, gc, pathlib, sys
gc.disable()  # imports are slow enough
from tandem.engine.kernels import load_library
library = load_library(pathlib.Path(sys.argv[1]), flags=sys.argv[3:])
"""
AS_THEY_ARE = """
from tests.engine import test_kernel_families, test_kernels, test_sampler
for number, sizes in enumerate(test_kernels.SHAPES[3:6:2]):
    folder = pathlib.Path(sys.argv[2], str(number))
    folder.mkdir()
    test_kernels.test_a_pass_computes_what_torch_does(library, sizes, 1 + number, "none", 8 * number, folder)
folder = pathlib.Path(sys.argv[2], "quantized")
folder.mkdir()
test_kernels.test_a_pass_computes_what_torch_does(library, test_kernels.SHAPES[0], 2, "ordered", 8, folder)
for family, quantization in (("qwen2-moe", "ordered"), ("gpt-oss", "mxfp4"), ("gemma3", "none"), ("glm4", "none")):
    folder = pathlib.Path(sys.argv[2], family)
    folder.mkdir()
    test_kernel_families.test_a_family_is_computed_as_torch_does(library, family, 7, 2, quantization, folder)
test_kernels.test_a_packed_weight_is_what_it_was(library, True)
test_kernels.test_a_quantized_weight_is_read_as_torch_reads_it(library, "int8", 96, True)
test_kernels.test_scales_and_offsets_stay_what_the_checkpoint_says(library, test_kernels.SCALE_TYPES[1], 4)
test_sampler.test_the_kernels_choose_as_torch_does(library, 64)
"""
OUT_OF_BOUNDS = """
library.tandem_survey(bytes(1024), 32, 64, 0, bytes(16))  # reads 4096; of 512 at most Python has a pool
"""


@pytest.fixture(scope="module")
def sanitizers(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Path], subprocess.CompletedProcess[str]]:
    """Runs code with `library` compiled so that an access out of bounds or undefined behaviour ends it."""
    gcc, cache = shutil.which("gcc"), tmp_path_factory.mktemp("sanitized")
    if gcc is None or not can_compile():
        pytest.skip("no CPU with AVX512-BF16, or no gcc")
    environment = watched(gcc)
    library_path(cache, flags=SANITIZE)  # here, where the compiler itself is not watched

    def run(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", SANITIZED + code, str(cache), str(folder), *SANITIZE]
        return subprocess.run(command, env=environment, capture_output=True, encoding="utf-8", timeout=280)

    return run


@pytest.mark.long
@pytest.mark.timeout(300)
def test_sanitizers_find_nothing(
    sanitizers: Callable[[str, Path], subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    done = sanitizers(AS_THEY_ARE, tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.long
@pytest.mark.timeout(300)
def test_sanitizers_would_find_something(
    sanitizers: Callable[[str, Path], subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    done = sanitizers(OUT_OF_BOUNDS, tmp_path)
    assert "AddressSanitizer: " in done.stderr
    assert "tandem_survey" in done.stderr


def test_without_a_compiler_torch_computes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(native, "compilers", list)
    with capture_logs() as logs:
        assert load_library(tmp_path) is None
    (entry,) = logs
    assert entry["log_level"] == "warning"
    assert entry["event"] == "CPU kernels are off, torch computes everything"
    assert not list(tmp_path.glob("*.so"))


def test_a_failing_compiler_and_an_unwritable_cache_are_no_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(native, "compilers", lambda: [["false"]])
    blocked = tmp_path / "file"
    blocked.touch()
    with capture_logs() as logs:
        assert load_library(tmp_path) is None
        assert load_library(blocked) is None
    assert len(logs) == 2
    assert list(tmp_path.iterdir()) == [blocked]


@pytest.mark.long
def test_concurrent_builders_leave_one_library(tmp_path: Path) -> None:
    code = "import sys, pathlib, tandem.engine.kernels as k; k.load_library(pathlib.Path(sys.argv[1]))"
    builders = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path)]) for _ in range(2)]
    assert [builder.wait(timeout=100) for builder in builders] == [0, 0]
    assert len(list(tmp_path.iterdir())) == can_compile()
