"""The engine alone in this process: decodes beside the bandwidth of memory, a prompt beside the GEMM's peak."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.gpu.rows import ReportRow, Scale
from benchmarks.load import prompt
from tandem.engine import Engine, EngineConfig, Request, SamplingParams

WARM_STEPS = 3


def engine_rows(scale: Scale, model: Path) -> list[ReportRow]:
    config = EngineConfig(
        model_path=model, model_name=model.name, device=scale.device, dtype=scale.dtype,
        kv_budget_bytes=scale.kv_mib << 20, max_num_batched_tokens=scale.prompt, cuda_graphs=scale.device != "cpu",
        enable_prefix_caching=False,
    )  # fmt: skip
    engine = Engine(config)
    read = memory_gb_s(scale)
    decodes = [decode(engine, scale, batch, read) for batch in scale.batches]
    return [*decodes, prefill(engine, scale)]


def decode(engine: Engine, scale: Scale, batch: int, memory_gb_s: float) -> ReportRow:
    """Each step reads all weights, and each sequence's KV."""
    begin(engine, batch, scale.context, 4 * scale.steps)
    while engine.stats().queued_tokens:
        engine.step()
    for _ in range(WARM_STEPS):
        engine.step()
    seconds = seconds_of(scale.device, lambda: [engine.step() for _ in range(scale.steps)])
    assert engine.stats().num_running == batch, "answers ended while they were timed"
    finish(engine)
    kv = 2 * scale.shape.layers * scale.shape.kv_heads * (scale.shape.hidden // scale.shape.heads)
    tokens = batch * (scale.context + scale.steps / 2)
    bytes_read = width(scale) * (scale.shape.parameters + tokens * kv)
    rate, floor = batch * scale.steps / seconds, batch * memory_gb_s * 1e9 / bytes_read
    return ReportRow(f"decode, batch {batch}", "tok/s", rate, "memory read alone", floor, wanted=0.8)


def prefill(engine: Engine, scale: Scale) -> ReportRow:
    rates = []
    for _ in range(scale.rounds + 1):
        begin(engine, 1, scale.prompt, 1)
        rates.append(flops(scale) / seconds_of(scale.device, engine.step) / 1e12)
        finish(engine)
    name = f"prefill of {scale.prompt:,} tokens"
    return ReportRow(name, "TFLOP/s", max(rates[1:]), "GEMM", gemm_tflop_s(scale), wanted=0.6)


def flops(scale: Scale) -> float:
    """Operations for a prompt: all weights but the head's, and causal attention."""
    shape, length = scale.shape, scale.prompt
    return 2.0 * shape.block_parameters * length + 2.0 * shape.layers * shape.hidden * length**2


def begin(engine: Engine, count: int, length: int, max_tokens: int) -> None:
    dice = random.Random(length)
    sampling = SamplingParams(max_tokens, temperature=0.0, ignore_eos=True)
    for number in range(count):
        engine.add(Request(str(number), prompt(dice, length), sampling))


def finish(engine: Engine) -> None:
    for request_id in engine.request_ids():
        engine.abort(request_id)


def memory_gb_s(scale: Scale) -> float:
    """A copy reads and writes each byte."""
    size = scale.copy_mib << 20
    return 2 * size / 1e9 / copy_seconds(scale.device, size, scale.rounds)


def copy_seconds(device: str, num_bytes: int, rounds: int) -> float:
    source, target = (torch.ones(num_bytes, dtype=torch.uint8, device=device) for _ in range(2))
    return min(seconds_of(device, lambda: target.copy_(source)) for _ in range(rounds + 1))


def gemm_tflop_s(scale: Scale) -> float:
    dtype = getattr(torch, scale.dtype)
    left, right = (torch.randn(scale.gemm, scale.gemm, device=scale.device, dtype=dtype) for _ in range(2))
    seconds = min(seconds_of(scale.device, lambda: left @ right) for _ in range(scale.rounds + 1))
    return 2.0 * scale.gemm**3 / seconds / 1e12


def seconds_of(device: str, work: Callable[[], object]) -> float:
    """Until the device has done it."""
    settle(device)
    start = time.perf_counter()
    work()
    settle(device)
    return time.perf_counter() - start


def settle(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize(device)


def width(scale: Scale) -> int:
    itemsize: int = getattr(torch, scale.dtype).itemsize
    return itemsize
