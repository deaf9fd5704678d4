"""`python -m benchmarks.overhead`: what a step costs beside the forward pass, on one core.

The engine is the real one, with scheduler, sampler and output; its forward pass is replaced by one that returns the
same random logits at once. So a step's time is what all else takes, with every sequence decoding.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.models import SMALL, Shape, made
from tandem.engine import Engine, EngineConfig, Request, SamplingParams
from tandem.engine.forward import StepInput

VOCABULARIES = (SMALL.vocab, 32_000)
BATCHES = (64, 256)
STEPS = 200
SAMPLING = {
    "greedy": SamplingParams(max_tokens=1000, temperature=0.0),
    "temperature 0.8": SamplingParams(max_tokens=1000, temperature=0.8),
    "temperature 0.8, top_p 0.95": SamplingParams(max_tokens=1000, temperature=0.8, top_p=0.95),
}


class NullForward:
    """Takes no time. Logits are drawn once, peaked as a language model's are."""

    def __init__(self, num_seqs: int, shape: Shape) -> None:
        self._hidden = torch.zeros(num_seqs, shape.hidden)
        self._logits = 4 * torch.randn(num_seqs, shape.vocab, generator=torch.Generator().manual_seed(0))

    def __call__(self, step: StepInput, written: Callable[[int], None] | None = None) -> Tensor:
        return self._hidden

    def logits(self, hidden: Tensor, rows: Sequence[int]) -> Tensor:
        return self._logits[: len(rows)]


def step_ms(shape: Shape, num_seqs: int, sampling: SamplingParams) -> float:
    """Median milliseconds of a step with `num_seqs` sequences running."""
    config = EngineConfig(made(shape), shape.name, num_threads=1, max_num_seqs=num_seqs, num_blocks=num_seqs * 24)
    engine, chance = Engine(config), random.Random(1)
    engine._runner._forward = NullForward(num_seqs, shape)  # type: ignore[union-attr]
    for i in range(num_seqs):
        prompt = chance.choices(range(300, shape.vocab), k=chance.randint(8, 64))
        engine.add(Request(str(i), prompt, replace(sampling, seed=i)))
    while engine.stats().queued_tokens:
        engine.step()
    times = []
    for _ in range(STEPS):
        start = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - start)
    return 1000 * statistics.median(times)


def main() -> None:
    table = Table("sampling", *(f"{count} seqs, {vocab:,} words" for vocab in VOCABULARIES for count in BATCHES))
    for name, sampling in SAMPLING.items():
        row = [
            f"{step_ms(replace(SMALL, name=f'overhead-{vocab}', layers=1, vocab=vocab), count, sampling):.2f} ms"
            for vocab in VOCABULARIES
            for count in BATCHES
        ]
        table.add_row(name, *row)
    Console().print(table)


if __name__ == "__main__":
    main()
