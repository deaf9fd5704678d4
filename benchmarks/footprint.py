"""`python -m benchmarks.footprint`: what an engine and a cluster take before they give anything.

kv       requests of Azure's trace, lengths halved, through one engine: of the token slots in the blocks that running
         sequences hold, over all steps, how many no token of theirs is for; and how many wait for theirs to be read
memory   an engine of the 387 M model with 1 GiB of KV cache, in a process of its own: the most memory it ever had,
         after reading 1,024 tokens and 16 answers, against weights + KV cache + 300 MB
start    `tandem up` with the demo model, started a second time: seconds until it is ready
"""

from __future__ import annotations

import json
import multiprocessing
import random
import resource
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from benchmarks.models import LARGE, OUT, SMALL, made
from benchmarks.peers import tandem
from benchmarks.workloads import prompt, trace
from tandem.engine import Engine, EngineConfig, Request, SamplingParams

RESULTS = OUT / "footprint.json"
DEMO = Path("models/demo/target")
KV_BYTES, OTHER_BYTES = 1 << 30, 300 * 10**6


def kv_waste() -> dict[str, float]:
    """Percent of allocated slots."""
    dice = random.Random(1)
    engine = Engine(EngineConfig(made(SMALL), SMALL.name, kv_budget_bytes=KV_BYTES, max_num_seqs=64))
    for number, job in enumerate(trace(dice, 256, answers=2, prompts=2)):
        sampling = SamplingParams(max_tokens=job.max_tokens, temperature=0.0)
        engine.add(Request(str(number), list(job.prompt), sampling))
    held, known, filled = map(sum, zip(*_steps(engine), strict=True))
    return {"waste %": 100 * (1 - known / held), "not read yet %": 100 * (known - filled) / held}


def _steps(engine: Engine) -> Iterator[tuple[int, int, int]]:
    """After each step, of running sequences (no two share a prefix): slots in their blocks, tokens, tokens with KV."""
    while engine.has_work():
        engine.step()
        running = list(engine._scheduler.running)
        slots = engine.layout.block_size * sum(len(seq.block_table) for seq in running)
        yield slots, sum(seq.num_tokens for seq in running), sum(seq.num_computed_tokens for seq in running)


def peak_memory() -> dict[str, float]:
    """MB; the limit of the ratio is 1.15."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as other:
        peak = other.submit(_peak_memory, made(LARGE)).result(timeout=300)
    weights = sum(file.stat().st_size for file in made(LARGE).glob("*.safetensors"))
    expected = weights + KV_BYTES + OTHER_BYTES
    return {"peak": peak / 1e6, "weights": weights / 1e6, "KV cache": KV_BYTES / 1e6, "ratio": peak / expected}


def _peak_memory(model: Path) -> int:
    engine, dice = Engine(EngineConfig(model, LARGE.name, kv_budget_bytes=KV_BYTES)), random.Random(1)
    for layer in engine.kv_cache:
        layer.fill_(0.0)  # every page is there, as after a long time
    sampling = SamplingParams(max_tokens=32, temperature=0.0)
    for number, length in enumerate((1024, *[64] * 16)):
        engine.add(Request(str(number), prompt(dice, length), sampling))
    while engine.has_work():
        engine.step()
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def start_s(model: Path) -> float:
    peer = tandem("footprint", "Tandem", "--prefill=1", "--decode=1")
    times = []
    for _ in range(2):
        start = time.perf_counter()
        with peer.running(model):
            times.append(time.perf_counter() - start)
    return times[-1]


def main() -> None:
    found = {"kv": kv_waste(), "memory": peak_memory(), "start": {"seconds": start_s(DEMO)}}
    for name, figures in found.items():
        print(f"{name}: " + ", ".join(f"{what} {value:,.2f}" for what, value in figures.items()))
    RESULTS.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
