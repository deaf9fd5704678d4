"""What proposing tokens ahead gains: decoded tokens per second, by method, as ratios to plain decoding.

`python -m benchmarks.speculation` continues code of the standard library with the demo model. One thread computes, and
its own CPU time counts, so that whatever else runs on the machine counts little; methods take turns, and what is shown
is the median of each round beside the plain one of its turn.
"""

from __future__ import annotations

import argparse
import inspect
import json.decoder
import statistics
import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from tandem.engine import Engine, EngineConfig, Request, SamplingParams
from tandem.speculative import Speculative

DEMO = Path(__file__).parents[1] / "models" / "demo"
METHODS = ("none", "ngram", "draft")
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0),
    "the model's defaults": SamplingParams(temperature=0.6, top_p=0.95, repetition_penalty=1.2),
    "temperature 1": SamplingParams(temperature=1.0),
}
STREAMS = (1, 4, 16)
PROMPT, ANSWER = 200, 200


@dataclass(frozen=True, slots=True)
class Round:
    """`steps`: decode steps that the whole batch took."""

    tokens_per_s: float
    steps: int
    proposed: int
    accepted: int


def prompts(model: Path, count: int) -> list[list[int]]:
    """Pieces of code, `PROMPT` tokens each."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    source = "".join(inspect.getsource(module) for module in (argparse, textwrap, statistics, inspect, json.decoder))
    ids: list[int] = tokenizer.encode(source).ids
    return [ids[i * 1000 : i * 1000 + PROMPT] for i in range(count)]


def decode(
    engine: Engine, prompts: Sequence[Sequence[int]], sampling: SamplingParams, speculative: Speculative
) -> Round:
    """All prompts are read first; what is measured begins behind them."""
    for number, prompt in enumerate(prompts):
        params = SamplingParams(
            max_tokens=ANSWER, temperature=sampling.temperature, top_p=sampling.top_p,
            repetition_penalty=sampling.repetition_penalty, seed=number,
        )  # fmt: skip
        engine.add(Request(str(number), list(prompt), params, speculative=speculative))
    while engine.stats().queued_tokens:
        engine.step()
    before, started, steps = engine.stats(), time.thread_time(), 0
    while engine.has_work():
        engine.step()
        steps += 1
    seconds, after = time.thread_time() - started, engine.stats()
    return Round(
        (after.num_written_tokens - before.num_written_tokens) / seconds,
        steps,
        after.num_proposed_tokens - before.num_proposed_tokens,
        after.num_accepted_tokens - before.num_accepted_tokens,
    )


def row(name: str, streams: int, rounds: Mapping[str, Sequence[Round]]) -> str:
    cells = [f"{name}, {streams}", f"{max(found.tokens_per_s for found in rounds['none']):.0f}"]
    for method in METHODS[1:]:
        last = rounds[method][-1]
        turns = zip(rounds[method], rounds["none"], strict=True)  # one after the other, on a machine that changes
        ratio = statistics.median(ours.tokens_per_s / plain.tokens_per_s for ours, plain in turns)
        cells.append(f"{ratio:.2f}x, {last.accepted} of {last.proposed}, {last.steps} steps")
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=DEMO / "target")
    parser.add_argument("--draft", type=Path, default=DEMO / "draft")
    parser.add_argument("--num-tokens", type=int, default=Speculative.num_tokens)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    config = EngineConfig(
        model_path=arguments.model, model_name="model", num_threads=1, speculative_model=arguments.draft
    )
    engine = Engine(config, now=time.thread_time)
    print("| sampling, streams | plain, tok/s | ngram | draft |\n|---|---|---|---|")
    for name, sampling in SAMPLINGS.items():
        for streams in STREAMS:
            found = prompts(arguments.model, streams)
            rounds: dict[str, list[Round]] = {method: [] for method in METHODS}
            for _ in range(arguments.rounds + 1):  # the first warms up
                for method in METHODS:
                    rounds[method].append(decode(engine, found, sampling, Speculative(method, arguments.num_tokens)))
            print(row(name, streams, {method: found[1:] for method, found in rounds.items()}), flush=True)


if __name__ == "__main__":
    main()
