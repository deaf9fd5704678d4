"""`python -m benchmarks.conversations`: what the next turn of a conversation costs, prefill always remote; with
`--returning`, what a conversation costs that memory has evicted, computed again and restored from disk.

1 clusters  one process that prefills and decodes; then pairs of workers with --disaggregation=require, in their turns
2 converse  turns of token ids, greedy: a prompt is the last one, its answer and what is new
3 compare   of the prompts of all turns but the first, the share that was computed anew, by the answers' own words; and
            the median TTFT of these turns beside that of the one process, whose cache is as warm
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import IO

import grpc
from rich.console import Console
from rich.table import Table

from benchmarks.models import LARGE, OUT, made
from tandem import rpc
from tandem.commands.up import DEMO_MODEL
from tandem.local import free_ports
from tandem.v1 import llm_pb2, llm_pb2_grpc

TURNS = 8
FIRST, ANSWER, SAID = 256, 64, 16
# Conversations that return, of so many tokens, and a cache that holds fewer than half of them.
RETURNING, RETURNING_TOKENS, SMALL_CACHE = 8, 1024, 240
NO_SETTINGS: Mapping[str, str] = {}
THINKING_S, READY_S, ANSWER_S = 0.3, 120.0, 120.0
CLUSTERS = {"one process": (0, 1), "1 + 1": (1, 1), "2 + 2": (2, 2)}
VOCABULARY = 4096
MODEL = "measured"


@dataclass(frozen=True, slots=True)
class MeasuredTurn:
    """One answer, behind the first of its conversation if `number` is not 0."""

    number: int
    prompt_tokens: int
    cached_tokens: int
    fetched_tokens: int
    ttft_s: float


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.conversations")
    parser.add_argument("--model", choices=("demo", "large"), default="large")
    parser.add_argument("--clusters", nargs="+", choices=tuple(CLUSTERS), default=tuple(CLUSTERS))
    parser.add_argument("--conversations", type=int, default=3)
    parser.add_argument("--returning", action="store_true")
    options = parser.parse_args()
    folder = DEMO_MODEL if options.model == "demo" else made(LARGE)
    if options.returning:
        _compare_returning(str(folder))
        return
    turns = {name: _measured(str(folder), *CLUSTERS[name], options.conversations) for name in options.clusters}
    table = Table("", "computed anew", "fetched", "TTFT, ms", "of one process")
    alone = median(turn.ttft_s for turn in _later(turns.get("one process", [])) or [_NOBODY])
    for name, measured in turns.items():
        later = _later(measured)
        prompts, ttft_s = sum(turn.prompt_tokens for turn in later), median(turn.ttft_s for turn in later)
        anew = sum(turn.prompt_tokens - turn.cached_tokens for turn in later) / prompts
        fetched = sum(turn.fetched_tokens for turn in later) / prompts
        table.add_row(name, f"{anew:.1%}", f"{fetched:.1%}", f"{1000 * ttft_s:.0f}", f"{ttft_s / alone:.2f}x")
    Console().print(table)


def _later(turns: Sequence[MeasuredTurn]) -> list[MeasuredTurn]:
    return [turn for turn in turns if turn.number]


_NOBODY = MeasuredTurn(1, 1, 0, 0, float("nan"))


def _measured(folder: str, prefill: int, decode: int, conversations: int) -> list[MeasuredTurn]:
    with _running(folder, prefill, decode) as address, grpc.insecure_channel(address, rpc.CHANNEL_OPTIONS) as channel:
        service = llm_pb2_grpc.LLMServiceStub(channel)
        _converse(service, random.Random("warm"))
        return [turn for seed in range(conversations) for turn in _converse(service, random.Random(seed))]


def _compare_returning(folder: str) -> None:
    """Prints the TTFT of conversations whose blocks others took, in one process: cold, computed again, and restored."""
    table = Table("", "TTFT, ms", "of computing", "cached tokens")
    computed_s = 0.0
    for name, disk in (("computed again", "0"), ("restored from disk", "8GiB")):
        with tempfile.TemporaryDirectory(dir=OUT) as blocks:
            settings = {"TANDEM_KV_DISK": disk, "TANDEM_KV_DISK_FOLDER": blocks, "TANDEM_NUM_BLOCKS": str(SMALL_CACHE)}
            with (
                _running(folder, 0, 1, settings) as address,
                grpc.insecure_channel(address, rpc.CHANNEL_OPTIONS) as channel,
            ):
                service = llm_pb2_grpc.LLMServiceStub(channel)
                turns = [turn for _ in range(2) for seed in range(RETURNING) for turn in _return(service, seed)]
        again = turns[RETURNING:]
        ttft_s, cached = median(turn.ttft_s for turn in again), median(turn.cached_tokens for turn in again)
        computed_s = computed_s or ttft_s
        table.add_row(name, f"{1000 * ttft_s:.0f}", f"{ttft_s / computed_s:.2f}x", f"{cached:.0f}")
    Console().print(table)


def _return(service: llm_pb2_grpc.LLMServiceStub, seed: int) -> list[MeasuredTurn]:
    """One turn of the conversation of that seed, always the same."""
    return _converse(service, random.Random(seed), 1, RETURNING_TOKENS)


def _converse(
    service: llm_pb2_grpc.LLMServiceStub, chance: random.Random, num_turns: int = TURNS, first_tokens: int = FIRST
) -> list[MeasuredTurn]:
    prompt, turns = chance.choices(range(3, VOCABULARY), k=first_tokens), list[MeasuredTurn]()
    sampling = llm_pb2.SamplingParams(max_tokens=ANSWER, temperature=0, ignore_eos=True)
    for number in range(num_turns):
        asked = llm_pb2.GenerateRequest(model=MODEL, token_ids=llm_pb2.TokenIds(ids=prompt), sampling=sampling)
        tokens, sent, first = list[int](), time.perf_counter(), 0.0
        for response in service.Generate(asked, timeout=ANSWER_S):
            tokens += response.token_ids
            first = first or time.perf_counter() - sent
        usage, path = response.usage, response.path
        turns.append(MeasuredTurn(number, usage.prompt_tokens, usage.cached_tokens, path.fetched_tokens, first))
        prompt = [*prompt, *tokens, *chance.choices(range(3, VOCABULARY), k=SAID)]
        time.sleep(THINKING_S)
    return turns


@contextmanager
def _running(folder: str, prefill: int, decode: int, settings: Mapping[str, str] = NO_SETTINGS) -> Iterator[str]:
    """The address of a cluster's gRPC door, once it is ready."""
    http, address, redis = free_ports(3)
    logs = OUT / "logs" / f"conversations-{prefill}-{decode}"
    logs.mkdir(parents=True, exist_ok=True)
    policy = "require" if prefill else "auto"
    command = [
        sys.executable, "-m", "tandem", "up", folder, f"--model-name={MODEL}", f"--prefill={prefill}",
        f"--decode={decode}", f"--disaggregation={policy}", f"--http-port={http}", f"--grpc-port={address}",
        f"--redis-port={redis}", f"--logs={logs}",
    ]  # fmt: skip
    with (logs / "up.log").open("w+", encoding="utf-8") as said, _started(command, said, settings) as up:
        try:
            for _ in range(round(READY_S / 0.1)):
                if "is ready" in (logs / "up.log").read_text(encoding="utf-8") or up.poll() is not None:
                    break
                time.sleep(0.1)
            yield f"127.0.0.1:{address}"
        finally:
            up.terminate()


def _started(command: Sequence[str], said: IO[str], settings: Mapping[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT, env={**os.environ, **settings})


if __name__ == "__main__":
    main()
