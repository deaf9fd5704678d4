"""Compares ranks with threads: an engine of n ranks with a thread each, and one of one rank with n threads.

`python -m benchmarks.parallel` measures both in turns, each time in new processes, on the 387 M model: prefill of one
prompt, decode of one sequence and of eight; what is shown are the medians of all rounds and their ratio. It also shows
how long the leader takes to say a step to the other ranks.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from array import array
from pathlib import Path

import torch

from benchmarks.models import LARGE, made
from tandem.engine import Engine, EngineConfig, Request, SamplingParams
from tandem.engine.forward import StepInput
from tandem.engine.parallel.steps import AdapterMemory, packed, read_message
from tandem.local.launcher import threads_environment

PROMPT, ANSWER, MANY = 512, 48, 8
FIGURES = ("prefill, tokens/s", "decode of 1, tokens/s", f"decode of {MANY}, tokens/s")


def measured(model: Path, dtype: str, ranks: int, threads: int) -> list[float]:
    """Returns the FIGURES of an engine."""
    config = EngineConfig(
        model, "m", dtype=dtype, num_blocks=1024, num_threads=threads, tensor_parallel=ranks,
        enable_prefix_caching=False,
    )  # fmt: skip
    engine = Engine(config)
    try:
        seconds(engine, 1, 2)
        first = seconds(engine, 1, 1)
        decoding = [(seconds(engine, count, ANSWER + 1), seconds(engine, count, 1)) for count in (1, MANY)]
    finally:
        engine.ranks.close()
    one, many = (whole - prefill for whole, prefill in decoding)
    return [PROMPT / first, ANSWER / one, MANY * ANSWER / many]


def seconds(engine: Engine, count: int, answer: int) -> float:
    """Returns the time of `count` prompts and their answers at once."""
    sampling = SamplingParams(max_tokens=answer, temperature=0.0, ignore_eos=True)
    vocabulary = engine.model_config.vocab_size
    for i in range(count):
        prompt = torch.randint(2, vocabulary, (PROMPT,), generator=torch.Generator().manual_seed(i)).tolist()
        engine.add(Request(f"r{i}", prompt, sampling))
    start = time.perf_counter()
    while engine.has_work():
        engine.step()
    return time.perf_counter() - start


def saying_us(seqs: int, blocks: int) -> float:
    """Returns the microseconds that writing and reading the message of a step take: of one token for each sequence."""
    ids = torch.zeros(seqs, dtype=torch.int64)
    step = StepInput(ids, ids, ids, [1] * seqs, array("q", [1] * seqs), [list(range(blocks))] * seqs)
    memory, rounds = AdapterMemory(), 1000
    start = time.perf_counter()
    for _ in range(rounds):
        read_message(memoryview(packed(memory.message(step))))
    return (time.perf_counter() - start) / rounds * 1e6


def in_a_process(dtype: str, ranks: int, threads: int) -> list[float]:
    command = [sys.executable, "-m", "benchmarks.parallel", "--one", dtype, str(ranks), str(threads)]
    variables = threads_environment(threads) | {"PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, encoding="utf-8", env=variables)
    found: list[float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--one", nargs=3, metavar=("DTYPE", "RANKS", "THREADS"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        dtype, ranks, threads = given.one
        print(json.dumps(measured(made(LARGE), dtype, int(ranks), int(threads))))
        return
    print(f"saying a step of 8 sequences over 64 blocks each: {saying_us(8, 64):.0f} us; 256: {saying_us(256, 64):.0f}")
    for dtype in given.dtypes:
        rounds = [[in_a_process(dtype, n, given.ranks) for n in (1, given.ranks)] for _ in range(given.rounds)]
        for i, figure in enumerate(FIGURES):
            alone, ranked = (statistics.median(each[side][i] for each in rounds) for side in (0, 1))
            print(f"{dtype}, {figure}: {ranked:.1f} of {alone:.1f}, {ranked / alone:.2f}x")


if __name__ == "__main__":
    main()
