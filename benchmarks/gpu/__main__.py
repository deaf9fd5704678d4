"""`python -m benchmarks.gpu`: what a GPU gives beside what it could, as JSON with device, versions and date.

    engine     decodes of a batch beside the memory's bandwidth (>= 0.8), a prompt beside the GEMM's peak (>= 0.6)
    transfer   KV between two processes on the device beside a copy within it (>= 0.7)
    serving    a prefill and a decode worker on one device beside one worker alone: TTFT (<= 1.1), ITL p99
    vllm       one worker alone beside vLLM, where that is installed: TTFT, tokens a second

A part that fails is named, and the others are measured; the exit status is then 1. One that cannot run here, as where
vLLM is not installed, is named too and is no failure; where nothing else was asked for, the exit status is 77. On
`--device=cpu` all is measured at a scale that only shows that it runs.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from benchmarks.gpu.bare import CANNOT, CANNOT_RUN
from benchmarks.gpu.engine import copy_seconds, engine_rows
from benchmarks.gpu.rows import SCALES, CannotRun, ReportRow, Scale, device_name, report, versions
from benchmarks.gpu.serving import serving_rows, vllm_rows
from benchmarks.models import OUT, made
from benchmarks.transfer import ORDERS, bandwidth

Part = Callable[[Scale, Path], list[ReportRow]]


def transfer_rows(scale: Scale, model: Path) -> list[ReportRow]:
    size = scale.copy_mib << 20
    found = bandwidth(
        scale.shape, scale.transport, ORDERS[0], num_bytes=size, push_tokens=512, layer_blocks=32,
        rounds=scale.rounds, device=scale.device,
    )  # fmt: skip
    copy = size / 1e9 / copy_seconds(scale.device, size, scale.rounds)
    return [ReportRow(f"KV by {scale.transport}", "GB/s", found.gb_s, "a copy within the device", copy, wanted=0.7)]


PARTS: dict[str, Part] = {"engine": engine_rows, "transfer": transfer_rows, "serving": serving_rows, "vllm": vllm_rows}


def main() -> None:
    options = options_of(sys.argv[1:])
    if options.device == "cuda" and not torch.cuda.is_available():
        print(f"torch {torch.__version__} sees no CUDA device; docs/gpu.md says what ran where")
        raise SystemExit(CANNOT)
    print(device_name(options.device), versions(), flush=True)
    scale, parts = SCALES[options.device], [name for name in options.only.split(",") if name]
    if parts:
        raise SystemExit(measure(scale, made(scale.shape), parts, options.out))


def measure(scale: Scale, model: Path, parts: list[str], out: Path) -> int:
    """Writes the report to `out` and returns the exit status."""
    rows, failed, cannot = list[ReportRow](), dict[str, str](), dict[str, str]()
    for name in parts:
        try:
            rows += (measured := PARTS[name](scale, model))
            print(*measured, sep="\n", flush=True)
        except CannotRun as error:
            cannot[name] = str(error)
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {error}"
            print(f"{name} FAILED: {failed[name]}", flush=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report(scale, rows, failed, cannot), indent=1, default=str), encoding="utf-8")
    print(f"written to {out}")
    for name, why in cannot.items():
        print(f"{name} {CANNOT_RUN}: {why}" if rows or failed else why, flush=True)
    return 1 if failed else CANNOT if not rows else 0


def options_of(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__.splitlines()[0])
    parts = ",".join(PARTS)
    parser.add_argument("--only", default=parts, help=f"parts, of {parts} (default: all); '' names the device")
    parser.add_argument("--device", choices=SCALES, default="cuda")
    parser.add_argument("--out", type=Path, default=OUT / "gpu.json")
    options = parser.parse_args(argv)
    if unknown := set(options.only.split(",")) - {*PARTS, ""}:
        parser.error(f"--only: {', '.join(sorted(unknown))} is none of {', '.join(PARTS)}")
    return options


if __name__ == "__main__":
    main()
