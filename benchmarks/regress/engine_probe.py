"""Prints what an engine's steps cost on one thread, as a line of JSON for each line that it reads.

`measures` runs this file in the folder of a tree.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

import tandem
from tandem.engine import Engine, EngineConfig, Request, SamplingParams

STREAMS, CONTEXT, PROMPT = (1, 16), 16, 1024
WARM_STEPS, STEPS, BLOCKS = 3, 8, 3


def main(model: Path) -> None:
    engines = {dtype: made(model, dtype) for dtype in ("bfloat16", "float32")}
    turn(engines)
    while sys.stdin.readline():
        print(json.dumps(turn(engines)), flush=True)


def made(model: Path, dtype: str) -> Engine:
    return Engine(
        EngineConfig(model, model.name, dtype=dtype, num_threads=1, num_blocks=512, enable_prefix_caching=False)
    )


def turn(engines: dict[str, Engine]) -> dict[str, float]:
    found: dict[str, float] = {}
    for dtype, engine in engines.items():
        for count in STREAMS:
            found[f"{count} stream{'s' * (count > 1)}, a step, {dtype}, ms"] = step_ms(engine, count)
        found[f"prefill of {PROMPT:,} tokens, {dtype}, ms"] = prefill_ms(engine)
    return found


def step_ms(engine: Engine, count: int) -> float:
    """Returns the cost of a step that decodes `count` streams, in the best of a few blocks of steps."""
    begin(engine, count, CONTEXT, WARM_STEPS + STEPS * BLOCKS + CONTEXT)
    while engine.stats().queued_tokens:
        engine.step()
    for _ in range(WARM_STEPS):
        engine.step()
    costs = [cpu_ms(lambda: [engine.step() for _ in range(STEPS)]) / STEPS for _ in range(BLOCKS)]
    assert engine.stats().num_running == count, "answers ended while their steps were measured"
    for request_id in engine.request_ids():
        engine.abort(request_id)
    return min(costs)


def prefill_ms(engine: Engine) -> float:
    def prefill() -> None:
        while engine.has_work():
            engine.step()

    begin(engine, 1, PROMPT, 1)
    return cpu_ms(prefill)


def begin(engine: Engine, count: int, length: int, max_tokens: int) -> None:
    dice = random.Random(length)
    sampling = SamplingParams(max_tokens, temperature=0.0, ignore_eos=True)
    for number in range(count):
        engine.add(Request(str(number), dice.choices(range(300, 4000), k=length), sampling))


def cpu_ms(work: Callable[[], object]) -> float:
    before = time.process_time()
    work()
    return 1000 * (time.process_time() - before)


if __name__ == "__main__":
    assert Path(tandem.__file__).is_relative_to(Path.cwd()), f"measures {tandem.__file__}"
    main(Path(sys.argv[1]))
