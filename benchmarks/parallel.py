"""Compares ranks with threads: an engine of n ranks with a thread each, and one of one rank with n threads.

`python -m benchmarks.parallel` has both in processes of their own, which measure in turns, on the 387 M model: prefill
of one prompt, decode of one sequence and of eight; what is shown are the medians of all rounds, and the median of each
round's ratio. It also shows how long the leader takes to say a step to the other ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from array import array

import torch

from benchmarks.models import LARGE, made
from tandem.engine import Engine, EngineConfig, Request, SamplingParams
from tandem.engine.forward import StepInput
from tandem.engine.parallel.steps import AdapterMemory, packed, read_message
from tandem.local.launcher import threads_environment

PROMPT, ANSWER, MANY = 256, 48, 8
MARK = "figures: "
FIGURES = ("prefill, tokens/s", "decode of 1, tokens/s", f"decode of {MANY}, tokens/s")


def measure(dtype: str, ranks: int, threads: int) -> None:
    """Writes the FIGURES of an engine to the standard output for each line of the standard input."""
    config = EngineConfig(
        made(LARGE), "m", dtype=dtype, num_blocks=1024, num_threads=threads, tensor_parallel=ranks,
        enable_prefix_caching=False,
    )  # fmt: skip
    engine = Engine(config)
    seconds(engine, MANY, 2)
    for _ in sys.stdin:
        first = seconds(engine, 1, 1)
        one, many = (seconds(engine, count, ANSWER + 1) - seconds(engine, count, 1) for count in (1, MANY))
        print(MARK + json.dumps([PROMPT / first, ANSWER / one, MANY * ANSWER / many]), flush=True)
    engine.ranks.close()


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


class Measuring:
    """An engine in a process of its own, which measures when it is told to."""

    def __init__(self, dtype: str, ranks: int, threads: int) -> None:
        command = [sys.executable, "-m", "benchmarks.parallel", "--one", dtype, str(ranks), str(threads)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8",
            env=os.environ | threads_environment(threads),
        )  # fmt: skip

    def figures(self) -> list[float]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        line = next(line for line in self._process.stdout if line.startswith(MARK))
        found: list[float] = json.loads(line.removeprefix(MARK))
        return found

    def end(self) -> None:
        self._process.communicate()


def compared(dtype: str, ranks: int, rounds: int) -> None:
    """Prints the figures of both ways in one dtype."""
    alone, ranked = (Measuring(dtype, count, ranks) for count in (1, ranks))
    found = [(alone.figures(), ranked.figures()) for _ in range(rounds)]
    alone.end()
    ranked.end()
    for i, figure in enumerate(FIGURES):
        before, after = (statistics.median(each[side][i] for each in found) for side in (0, 1))
        ratio = statistics.median(its[i] / other[i] for other, its in found)
        print(f"{dtype}, {figure}: {after:.1f} of {before:.1f}, {ratio:.2f}x", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--one", nargs=3, metavar=("DTYPE", "RANKS", "THREADS"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        measure(given.one[0], *map(int, given.one[1:]))
        return
    print(f"saying a step of 8 sequences over 64 blocks each: {saying_us(8, 64):.0f} us; 256: {saying_us(256, 64):.0f}")
    for dtype in given.dtypes:
        compared(dtype, given.ranks, given.rounds)


if __name__ == "__main__":
    main()
