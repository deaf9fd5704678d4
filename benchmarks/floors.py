"""The machine's two floors: no engine decodes faster than memory is read, none prefills faster than GEMM computes.

`python -m benchmarks.floors` measures in a process of its own, so that its threads disturb no measurement after it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

from tandem.machine.resources import usable_cpus

READ_BYTES = 1 << 29
GEMM_SIZE = 2048
REPEATS = 7
BOUND_S = 120.0


@dataclass(frozen=True, slots=True)
class Floors:
    """Best of several repeats, on one thread and on every core."""

    cores: int
    read_gb_s_one: float
    read_gb_s: float
    gemm_gflop_s_one: float
    gemm_gflop_s: float

    def __str__(self) -> str:
        return (
            f"memory read {self.read_gb_s_one:.1f} GB/s on one thread, {self.read_gb_s:.1f} on {self.cores}; "
            f"bf16 GEMM {self.gemm_gflop_s_one:.0f} GFLOP/s on one thread, {self.gemm_gflop_s:.0f} on {self.cores}"
        )


def measured() -> Floors:
    """Runs this module as a process and reads its answer.

    Raises:
        subprocess.SubprocessError: it failed, or took longer than its bound.
    """
    command = [sys.executable, "-m", "benchmarks.floors"]
    done = subprocess.run(command, check=True, capture_output=True, encoding="utf-8", timeout=BOUND_S)
    return Floors(**json.loads(done.stdout))


def _measure() -> Floors:
    import torch

    data = torch.ones(READ_BYTES // 8, dtype=torch.int64)
    left, right = (torch.ones(GEMM_SIZE, GEMM_SIZE, dtype=torch.bfloat16) for _ in range(2))
    cores = usable_cpus()
    read, gemm = [], []
    for threads in (1, cores):
        torch.set_num_threads(threads)
        read.append(READ_BYTES / 1e9 / _best_seconds(data.sum))
        gemm.append(2 * GEMM_SIZE**3 / 1e9 / _best_seconds(lambda: torch.mm(left, right)))
    return Floors(cores, read[0], read[1], gemm[0], gemm[1])


def _best_seconds(work: Callable[[], object]) -> float:
    seconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


if __name__ == "__main__":
    print(json.dumps(asdict(_measure())))
