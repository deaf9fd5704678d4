"""A row of the report: a value, another of the same run to compare it with, their ratio, and the wanted ratio."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, Literal

import torch

from benchmarks.gpu.bare import PEER_VLLM
from benchmarks.models import Shape

LIBRARIES = ("torch", "cupy-cuda13x", "cupy-cuda12x", "flashinfer-python", "tandem", "vllm")


class CannotRun(RuntimeError):
    """A part needs what is not here; says what. Nothing has failed."""


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is measured. `device` "cpu" shows without a GPU that this runs; its figures mean nothing."""

    device: str
    dtype: Literal["bfloat16", "float32"]
    shape: Shape
    batches: tuple[int, ...]  # of decodes
    context: int  # tokens before a decode
    steps: int  # decodes timed
    prompt: int  # of the prefill
    prompts: tuple[int, ...]  # whose TTFT is compared
    transport: str  # within the device
    kv_mib: int  # of each worker, and moved to compare with a copy
    copy_mib: int
    gemm: int
    rounds: int


FULL = Scale(
    device="cuda", dtype="bfloat16", shape=Shape("qwen2-1.4b", 1536, 28, 12, 2, 8960, 32_000, 40_960),
    batches=(1, 64), context=512, steps=128, prompt=4096, prompts=(4096, 32_768), transport="cuda_ipc", kv_mib=4096,
    copy_mib=2048, gemm=8192, rounds=5,
)  # fmt: skip

# Shows that everything runs; what it measures means nothing.
SMALL = Scale(
    device="cpu", dtype="float32", shape=Shape("tiny", 64, 2, 4, 2, 128, 4096, 512), batches=(1, 3), context=40,
    steps=6, prompt=64, prompts=(64,), transport="tcp", kv_mib=4, copy_mib=4, gemm=64, rounds=1,
)  # fmt: skip
SCALES = {scale.device: scale for scale in (FULL, SMALL)}


@dataclass(frozen=True, slots=True)
class ReportRow:
    name: str
    unit: str
    value: float
    against: str
    reference: float
    wanted: float | None = None  # at least this ratio; at most it, where `better` is lower
    better: Literal["higher", "lower"] = "higher"

    @property
    def ratio(self) -> float:
        return self.value / self.reference

    @property
    def met(self) -> bool | None:
        if self.wanted is None:
            return None
        return self.ratio >= self.wanted if self.better == "higher" else self.ratio <= self.wanted

    def __str__(self) -> str:
        goal = "" if self.wanted is None else f", wanted {'>=' if self.better == 'higher' else '<='} {self.wanted:.2f}"
        said = f"{self.name}: {self.value:,.1f} {self.unit}; {self.against} {self.reference:,.1f}"
        return f"{said}; ratio {self.ratio:.2f}{goal}{'' if self.met is not False else ', MISSED'}"


def report(scale: Scale, rows: Sequence[ReportRow], failed: dict[str, str], cannot: dict[str, str]) -> dict[str, Any]:
    """As it is written: what was measured where, when and with what; which parts failed or cannot run here, and why."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": device_name(scale.device),
        "versions": versions(),
        "scale": asdict(scale),
        "rows": [asdict(row) | {"ratio": row.ratio, "met": row.met} for row in rows],
        "failed": failed,
        "cannot": cannot,
    }


def device_name(device: str) -> str:
    return torch.cuda.get_device_name(device) if device != "cpu" else "cpu"


def carried() -> list[str]:
    """The folder of vLLM that was carried here, where it is there."""
    place = os.environ.get(PEER_VLLM)
    return [place] if place and (Path(place) / "vllm").is_dir() else []


def versions() -> dict[str, str]:
    found = {"cuda": str(torch.version.cuda)}
    if torch.cuda.is_available():
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    for name in LIBRARIES:
        found.update((name, one.version) for one in distributions(name=name, path=[*sys.path, *carried()]))
    return found
