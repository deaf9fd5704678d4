"""One GGUF file in Tandem and in llama.cpp's server: do they say the same, and how fast?

1. truth   transformers over the numbers that `gguf` opens, in float32, at every position of some English and some code
2. words   each server is asked for one token behind each of these prefixes: wherever the truth's two best, or
           llama.cpp's, are more than GAP apart, it should be the same one
3. speed   in turns, each server alone: one stream, 16 streams, and prefilling a prompt

`python -m benchmarks.gguf` prints both as tables; the file is SmolLM2's (Q4_1, Q8_0, F32), or --model's.
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import pydoc_data.topics
import statistics
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import httpx
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from benchmarks.load import Job, LoadClient, closed_loop
from benchmarks.peers import MeasuredPeer, llama_cpp, opened, tandem
from benchmarks.results import decode_rate
from tandem.checkpoints import as_folder, find_model

GAP = 0.5
BEHIND, LENGTH, TEXTS = 16, 80, 4  # the first position asked for, the last, and texts of each kind
ASK_BOUND_S = 60.0
Ranked = list[tuple[str, float]]


@dataclass(frozen=True, slots=True)
class Question:
    """Token ids, and what the truth says comes next: its two best and their logarithms' difference."""

    ids: list[int]
    best: str
    gap: float


def questions(file: Path) -> list[Question]:
    folder = as_folder(file)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    model = cast(Any, AutoModelForCausalLM).from_pretrained(opened(file), dtype=torch.float32).eval()
    found = []
    for text in texts():
        ids: list[int] = tokenizer.encode(text).ids[:LENGTH]
        with torch.inference_mode():
            logits: torch.Tensor = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        values, best = logits.topk(2)
        found += [
            Question(ids[: i + 1], tokenizer.decode([int(best[i, 0])]), float(values[i, 0] - values[i, 1]))
            for i in range(BEHIND, len(ids))
        ]
    return found


def texts() -> list[str]:
    """Prose of Python's manual, and code of its library."""
    topics = ("typesobjects", "naming", "import", "exceptions")
    prose = [pydoc_data.topics.topics[name] for name in topics if name in pydoc_data.topics.topics]
    code = [inspect.getsource(part) for part in (textwrap.wrap, statistics.fmean, inspect.getdoc, asyncio.wait_for)]
    return [*prose[:TEXTS], *code[:TEXTS]]


async def answers(client: LoadClient, asked: Sequence[Question]) -> list[Ranked]:
    """The two best tokens that the server has for each question."""
    async with httpx.AsyncClient(timeout=ASK_BOUND_S, trust_env=False) as http:
        found = []
        for question in asked:
            body = {"model": client.model, "prompt": question.ids, "max_tokens": 1, "temperature": 0, "logprobs": 2}
            answer = await http.post(f"{client.url}/v1/completions", json=body)
            answer.raise_for_status()
            found.append(_ranked(answer.json()["choices"][0]["logprobs"]))
    return found


def _ranked(logprobs: Any) -> Ranked:
    """The two best, of logprobs as OpenAI's completions have them, or as llama.cpp writes them, which are chat's."""
    if "content" in logprobs:
        best = [(one["token"], one["logprob"]) for one in logprobs["content"][0]["top_logprobs"]]
    else:
        best = list(logprobs["top_logprobs"][0].items())
    return sorted(best, key=lambda pair: -pair[1])[:2]


def words_row(title: str, asked: Sequence[Question], ours: list[Ranked], theirs: list[Ranked]) -> str:
    """Positions where a lead of more than GAP is followed, of all such."""
    by_truth = [own[0][0] == one.best for one, own in zip(asked, ours, strict=True) if one.gap > GAP]
    led = [pair for pair in zip(ours, theirs, strict=True) if pair[1][0][1] - pair[1][1][1] > GAP]
    by_theirs = [own[0][0] == other[0][0] for own, other in led]
    everywhere = [own[0][0] == one.best for one, own in zip(asked, ours, strict=True)]
    cells = (f"{sum(same)} of {len(same)}" for same in (by_truth, by_theirs, everywhere))
    return f"| {title} | {' | '.join(cells)} |"


def speed(client: LoadClient) -> dict[str, float]:
    """Tokens a second."""

    def rate(streams: int, prompt: int, tokens: int) -> float:
        jobs = [Job([300 + (7 * i + n) % 200 for i in range(prompt)], tokens) for n in range(streams)]
        found = asyncio.run(closed_loop(client, jobs, streams))
        return decode_rate(found) if tokens > 1 else prompt / found[0].ttft

    return {"1 stream": rate(1, 32, 96), "16 streams": rate(16, 32, 32), "prompt of 1,024": rate(1, 1024, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    file = find_model(arguments.model).path
    peers = {
        "Tandem": tandem("tandem-gguf", "Tandem", "--prefill=0", "--decode=1"),
        "llama.cpp": llama_cpp("llama-cpp-gguf", "llama.cpp", None),
    }
    asked, ranked = questions(file), dict[str, list[Ranked]]()
    for name, peer in peers.items():
        with peer.running(file) as client:
            ranked[name] = asyncio.run(answers(client, asked))
    print(f"| same token, lead above {GAP} | truth's lead | llama.cpp's lead | truth's, any lead |\n|---|---|---|---|")
    for name in peers:
        print(words_row(name, asked, ranked[name], ranked["llama.cpp"]), flush=True)
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in peers}
    for _ in range(arguments.rounds):
        for name, peer in peers.items():
            with peer.running(file) as client:
                rounds[name].append(speed(client))
                print(name, rounds[name][-1], flush=True)
    shown(peers, rounds)


def shown(peers: dict[str, MeasuredPeer], rounds: dict[str, list[dict[str, float]]]) -> None:
    print("\n| tok/s | " + " | ".join(rounds["Tandem"][0]) + " |\n|---|---|---|---|")
    for name in peers:
        medians = (statistics.median(found[what] for found in rounds[name]) for what in rounds[name][0])
        print(f"| {name} | " + " | ".join(f"{value:.1f}" for value in medians) + " |")


if __name__ == "__main__":
    main()
