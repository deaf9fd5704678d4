"""What quantized weights and KV gain: a decode step's and a prompt's time, as ratios to plain bfloat16.

`python -m benchmarks.quantization` runs the 387 M model once for each method. One thread computes, and its own CPU time
counts, so that whatever else runs on the machine counts little; methods take turns, and the best step of each is shown.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from benchmarks.models import LARGE, made
from tandem.engine import Engine, EngineConfig, Request, SampledToken, SamplingParams

METHODS = ("none", "int8", "int4", "int8 KV")
STREAMS = (1, 4, 16)
PROMPT, CONTEXT = 256, 2000


def engine_of(model: Path, method: str) -> Engine:
    weights, kv = ("none", "int8") if method == "int8 KV" else (method, "auto")
    config = EngineConfig(
        model_path=model, model_name="model", dtype="bfloat16", num_threads=1, enable_prefix_caching=False,
        num_blocks=STREAMS[-1] * (CONTEXT // 16 + 4), max_num_batched_tokens=PROMPT, quantization=weights,
        kv_cache_dtype=kv,
    )  # fmt: skip
    return Engine(config)


def prompt_of(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(1, 4096), k=length)


def timed(engine: Engine) -> float:
    started = time.thread_time()
    engine.step()
    return time.thread_time() - started


def decoding(engine: Engine, streams: int, steps: int) -> float:
    """The best step's seconds of so many sequences, with a short context."""
    for i in range(streams):
        engine.add(Request(f"r{i}", prompt_of(8, i), SamplingParams(max_tokens=steps + 2, temperature=0.0)))
    while engine.stats().queued_tokens:
        engine.step()
    best = min(timed(engine) for _ in range(steps))
    for i in range(streams):
        engine.abort(f"r{i}")
    return best


def far_behind(engine: Engine, streams: int, steps: int) -> float:
    """The best step's seconds of so many sequences behind CONTEXT tokens, whose KV is taken as landed."""
    for i in range(streams):
        request = Request(f"r{i}", prompt_of(CONTEXT, i), SamplingParams(max_tokens=steps + 2, temperature=0.0))
        assert engine.reserve(request) is not None
        engine.join(f"r{i}", SampledToken(5))
    best = min(timed(engine) for _ in range(steps))
    for i in range(streams):
        engine.abort(f"r{i}")
    return best


def reading(engine: Engine, rounds: int) -> float:
    """The best seconds for a prompt of PROMPT tokens."""
    found = []
    for i in range(rounds):
        engine.add(Request("r", prompt_of(PROMPT, i), SamplingParams(max_tokens=2, temperature=0.0)))
        found.append(timed(engine))
        engine.abort("r")
    return min(found)


def compared(engines: Sequence[Engine], measure: Callable[[Engine], float], turns: int) -> list[float]:
    return [min(times) for times in zip(*([measure(engine) for engine in engines] for _ in range(turns)), strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    arguments = parser.parse_args()
    model = made(LARGE)
    engines = [engine_of(model, method) for method in METHODS]
    print(f"| {LARGE.name}, ms of CPU, one thread | " + " | ".join(METHODS) + " |\n|---|" + "---|" * len(METHODS))
    cases: list[tuple[str, Callable[[Engine], float]]] = [
        (f"a step of {n}", partial(decoding, streams=n, steps=arguments.steps)) for n in STREAMS
    ]
    cases.append((f"a step of 16 behind {CONTEXT:,} tokens", partial(far_behind, streams=16, steps=3)))
    cases.append((f"a prompt of {PROMPT}", partial(reading, rounds=1)))
    for name, measure in cases:
        times = compared(engines, measure, arguments.turns)
        cells = (f"{seconds * 1000:.1f} ({times[0] / seconds:.2f}x)" for seconds in times)
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
