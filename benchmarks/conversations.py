"""`python -m benchmarks.conversations`: what the next turn of a conversation costs, prefill always remote; with
`--returning`, what a conversation costs that memory has evicted, computed again, and from host memory, disk and
another worker.

1 clusters  one process that prefills and decodes; then pairs of workers with --disaggregation=require, in their turns
2 converse  turns of token ids, greedy: a prompt is the last one, its answer and what is new
3 compare   of the prompts of all turns but the first, the share that was computed anew, by the answers' own words; and
            the median TTFT of these turns beside that of the one process, whose cache is as warm
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import IO, Any

import grpc
import httpx
from rich.console import Console
from rich.table import Table

from benchmarks.models import LARGE, OUT, made
from benchmarks.results import percentile
from tandem import rpc
from tandem.commands.clusters.own_cluster import with_own_password
from tandem.commands.up import DEMO_MODEL
from tandem.local import free_ports
from tandem.registry import Registry
from tandem.v1 import llm_pb2, llm_pb2_grpc

TURNS = 8
FIRST, ANSWER, SAID = 256, 64, 16
# Conversations that return, of so many tokens, and a cache that holds fewer than half of them.
RETURNING, RETURNING_TOKENS, SMALL_CACHE = 8, 1024, 240
SMALL = {"TANDEM_NUM_BLOCKS": str(SMALL_CACHE)}
NO_SETTINGS: Mapping[str, str] = {}
# Where the blocks of conversations that return come from: prefill workers beside the one decode worker, settings of
# both, and further options.
RETURNS: Mapping[str, tuple[int, Mapping[str, str], Sequence[str]]] = {
    "computed again": (0, SMALL, ()),
    "cached": (0, {"TANDEM_NUM_BLOCKS": "1000"}, ()),
    "host": (0, SMALL | {"TANDEM_KV_HOST": "8GiB"}, ()),
    "disk": (0, SMALL | {"TANDEM_KV_DISK": "8GiB"}, ()),
    "computed again, 1 + 1": (1, SMALL, ()),
    "another worker, 1 + 1": (1, {}, ("--prefill-kv-memory=64MiB", "--decode-kv-memory=1GiB")),
}
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
    Console(width=120).print(table)


def _later(turns: Sequence[MeasuredTurn]) -> list[MeasuredTurn]:
    return [turn for turn in turns if turn.number]


_NOBODY = MeasuredTurn(1, 1, 0, 0, float("nan"))


def _measured(folder: str, prefill: int, decode: int, conversations: int) -> list[MeasuredTurn]:
    with (
        _running(folder, prefill, decode) as (address, _),
        grpc.insecure_channel(address, rpc.CHANNEL_OPTIONS) as channel,
    ):
        service = llm_pb2_grpc.LLMServiceStub(channel)
        _converse(service, random.Random("warm"))
        return [turn for seed in range(conversations) for turn in _converse(service, random.Random(seed))]


def _compare_returning(folder: str) -> None:
    """Prints the TTFT of conversations whose blocks others took, by where they come from, and what that took of steps.

    Between two of them another answer is written; its longest pauses are those of a neighbour.
    """
    table = Table("", "TTFT, ms", "of computing", "cached, and beside", "engine kept", "neighbour's ITL p50, p99, ms")
    computed_s = 0.0
    for name, (prefill, settings, options) in RETURNS.items():
        with tempfile.TemporaryDirectory(dir=OUT) as blocks:
            given = {**settings, "TANDEM_KV_DISK_FOLDER": blocks}
            with (
                _running(folder, prefill, 1, given, options) as (address, redis),
                grpc.insecure_channel(address, rpc.CHANNEL_OPTIONS) as channel,
            ):
                service = llm_pb2_grpc.LLMServiceStub(channel)
                turns = [turn for i in range(2) for seed in range(RETURNING) for turn in _return(service, seed, i)]
                gaps, beside = _beside_returns(service)
                kept = _kept_share(asyncio.run(_metrics_of(redis)))
        again = turns[RETURNING:]
        ttft_s = median(turn.ttft_s for turn in again)
        cached = ", ".join(f"{median(turn.cached_tokens for turn in turns):.0f}" for turns in (again, beside))
        computed_s = ttft_s if name.startswith("computed") else computed_s
        itl = f"{1000 * percentile(gaps, 50):.1f}, {1000 * percentile(gaps, 99):.1f}"
        table.add_row(name, f"{1000 * ttft_s:.0f}", f"{ttft_s / computed_s:.2f}x", cached, f"{kept:.2%}", itl)
    Console(width=120).print(table)


def _beside_returns(service: llm_pb2_grpc.LLMServiceStub) -> tuple[list[float], list[MeasuredTurn]]:
    """Returns the seconds between an answer's tokens while other conversations return, one after the other; and the
    turns of these.
    """
    with ThreadPoolExecutor(1) as pool:
        returning = pool.submit(lambda: [turn for seed in range(RETURNING) for turn in _return(service, seed, 2)])
        prompt, gaps, last = list(range(3, 3 + FIRST)), list[float](), 0.0
        sampling = llm_pb2.SamplingParams(max_tokens=2000, temperature=0, ignore_eos=True)
        asked = llm_pb2.GenerateRequest(model=MODEL, token_ids=llm_pb2.TokenIds(ids=prompt), sampling=sampling)
        call: Any = service.Generate(asked, timeout=ANSWER_S)
        for response in call:
            now = time.perf_counter()
            if last and response.token_ids:
                gaps += [(now - last) / len(response.token_ids)] * len(response.token_ids)
            last = now
            if returning.done():
                call.cancel()
                break
        return gaps, returning.result()


async def _metrics_of(redis_port: int) -> list[str]:
    """Returns the addresses of all workers' metrics."""
    registry = Registry.connect(with_own_password(f"redis://127.0.0.1:{redis_port}"))
    try:
        return [worker.info.metrics_address for worker in await registry.workers()]
    finally:
        await registry.close()


def _kept_share(addresses: Sequence[str]) -> float:
    """Returns the share of step time for which the workers' engines may have waited for moving blocks."""
    sums = dict.fromkeys(("tandem_moving_seconds_total", "tandem_step_seconds_total"), 0.0)
    for address in addresses:
        for line in httpx.get(f"http://{address}/metrics", trust_env=False).text.splitlines():
            name, _, value = line.partition("{")
            if name in sums:
                sums[name] += float(value.rpartition(" ")[2])
    return sums["tandem_moving_seconds_total"] / sums["tandem_step_seconds_total"]


def _return(service: llm_pb2_grpc.LLMServiceStub, seed: int, number: int) -> list[MeasuredTurn]:
    """One turn of the conversation of that seed, always the same but for what is said last."""
    said = random.Random(number).choices(range(3, VOCABULARY), k=SAID)
    return _converse(service, random.Random(seed), 1, RETURNING_TOKENS - SAID, said)


def _converse(
    service: llm_pb2_grpc.LLMServiceStub, chance: random.Random, num_turns: int = TURNS, first_tokens: int = FIRST,
    said: Sequence[int] = (),
) -> list[MeasuredTurn]:  # fmt: skip
    prompt, turns = [*chance.choices(range(3, VOCABULARY), k=first_tokens), *said], list[MeasuredTurn]()
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
def _running(
    folder: str, prefill: int, decode: int, settings: Mapping[str, str] = NO_SETTINGS, options: Sequence[str] = ()
) -> Iterator[tuple[str, int]]:
    """The address of a cluster's gRPC door and the port of its Redis, once it is ready."""
    http, address, redis = free_ports(3)
    logs = OUT / "logs" / f"conversations-{prefill}-{decode}"
    logs.mkdir(parents=True, exist_ok=True)
    policy = "require" if prefill else "auto"
    command = [
        sys.executable, "-m", "tandem", "up", folder, f"--model-name={MODEL}", f"--prefill={prefill}",
        f"--decode={decode}", f"--disaggregation={policy}", f"--http-port={http}", f"--grpc-port={address}",
        f"--redis-port={redis}", f"--logs={logs}", *options,
    ]  # fmt: skip
    with (logs / "up.log").open("w+", encoding="utf-8") as said, _started(command, said, settings) as up:
        try:
            for _ in range(round(READY_S / 0.1)):
                if "is ready" in (logs / "up.log").read_text(encoding="utf-8") or up.poll() is not None:
                    break
                time.sleep(0.1)
            yield f"127.0.0.1:{address}", redis
        finally:
            up.terminate()


def _started(command: Sequence[str], said: IO[str], settings: Mapping[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT, env={**os.environ, **settings})


if __name__ == "__main__":
    main()
