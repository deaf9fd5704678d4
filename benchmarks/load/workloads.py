"""The workloads: each sends its load to one server and gives its figures. Fresh prompts each round: nothing is cached.

All lengths are tokens; prompts are random token ids, answers are greedy and of exactly the length asked for.
"""

from __future__ import annotations

import asyncio
import csv
import random
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

from benchmarks.load.http import Job, LoadClient, closed_loop, in_batches, in_slots, open_loop
from benchmarks.models import LARGE, SMALL, Shape
from benchmarks.results import Metric, TimedAnswer, decode_rate, gaps, goodput, percentile, throughput, wall

TRACE = Path("../shared/traces/azure_conv_2023.csv")
TRACE_SOURCE = "AzureLLMInferenceTrace_conv.csv of github.com/Azure/AzurePublicDataset"
TRACE_REQUESTS, TRACE_SPEEDUP, TRACE_SLOTS = 4096, 20, 64
# The trace is of GPUs, and a GPU reads a prompt's token for less: an H100 computes 989 TFLOP/s of bf16 and reads 3.35
# TB/s, 295 FLOP a byte, where two Zen 4 cores were measured (benchmarks.floors) at 416 GFLOP/s and 34.5 GB/s, 12 FLOP a
# byte. So that prompts take the share of the time that they take there, they are cut 295 / 12 = 24 times as much.
TRACE_SCALE, PROMPT_SCALE = 2, 2 * 24
TTFT_S, ITL_S = 8.0, 0.150
POISSON_PER_S, POISSON_REQUESTS = 0.88, 60
POISSON_TTFT_S, POISSON_TPOT_S = 1.5, 0.120
BATCHING = ("tandem-1p1d", "tandem", "vllm", "openvino", "llama-cpp")
EVERYONE = ("tandem-1p1d", "tandem", "vllm", "transformers")
SERVERS = ("tandem-1p1d", "tandem", "vllm")
# Ids below are special tokens and single bytes; ids above may not be in both vocabularies.
FIRST_ID, LAST_ID = 300, 4000

# A list of people that no answer of 64 tokens ends; few of its tokens are the only ones possible.
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "minLength": 20}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
SCHEMA = {"type": "array", "items": PERSON, "minItems": 64}
RESPONSE_FORMAT = {"type": "json_schema", "json_schema": {"name": "people", "schema": SCHEMA}}

Run = Callable[[LoadClient, random.Random], Coroutine[Any, Any, dict[str, float]]]


@dataclass(frozen=True, slots=True)
class Workload:
    """`run(client, dice)` gives a value for each metric, in its unit; `peers` run it unless others are named; beside
    `noise` other processes that compute."""

    name: str
    title: str
    shape: Shape
    metrics: tuple[Metric, ...]
    run: Run
    peers: tuple[str, ...] = EVERYONE
    noise: int = 0
    quiet: str = ""  # the same one without them

    def of(self, shape: Shape) -> Workload:
        """Returns the same load on another model."""
        return replace(self, shape=shape, title=f"{self.title}; {shape.name}")

    def beside(self, noise: int) -> Workload:
        name, title = f"{self.name}-noise", f"{self.title}; beside {noise} that spin"
        return replace(self, name=name, title=title, noise=noise, quiet=self.name)


def prompt(dice: random.Random, length: int) -> list[int]:
    return [dice.randint(FIRST_ID, LAST_ID) for _ in range(length)]


async def single(client: LoadClient, dice: random.Random) -> dict[str, float]:
    answer = await client.send(Job(prompt(dice, 64), 128))
    return {"decode": decode_rate([answer]), "itl p99": _ms(percentile(answer.gaps, 99))}


async def concurrent(client: LoadClient, dice: random.Random) -> dict[str, float]:
    answers = await closed_loop(client, [Job(prompt(dice, 256), 64) for _ in range(16)], 16)
    return {
        "output": throughput(answers),
        "ttft p50": _ms(percentile([answer.ttft for answer in answers], 50)),
        "itl p99": _ms(percentile(gaps(answers), 99)),
    }


async def phase(client: LoadClient, dice: random.Random) -> dict[str, float]:
    answers = await closed_loop(client, [Job(prompt(dice, 32), 128) for _ in range(16)], 16)
    return {"decode": decode_rate(answers), "itl p99": _ms(percentile(gaps(answers), 99))}


async def prefill(client: LoadClient, dice: random.Random) -> dict[str, float]:
    answer = await client.send(Job(prompt(dice, 1024), 1))
    return {"prefill": 1024 / answer.ttft, "ttft": _ms(answer.ttft)}


async def prefix(client: LoadClient, dice: random.Random) -> dict[str, float]:
    shared = prompt(dice, 1024)
    first = await client.send(Job(shared + prompt(dice, 32), 16))
    answers = await closed_loop(client, [Job(shared + prompt(dice, 32), 16) for _ in range(16)], 16)
    return {"wall": wall(answers), "first alone": first.done - first.sent}


async def cached(client: LoadClient, dice: random.Random) -> dict[str, float]:
    """Two prompts that share nothing, then three that start as the first did; each alone."""
    shared = prompt(dice, 500)
    fresh = [await client.send(Job(head + prompt(dice, 50), 1)) for head in (shared, prompt(dice, 500))]
    again = [await client.send(Job(shared + prompt(dice, 50), 1)) for _ in range(3)]
    cold, warm = (percentile([answer.ttft for answer in answers], 50) for answers in (fresh, again))
    return {"cold": _ms(cold), "warm": _ms(warm), "gain": cold / warm}


async def disturbed(
    client: LoadClient, dice: random.Random, length: int = 1024, every_s: float = 8
) -> dict[str, float]:
    """Waves of 4 decodes: one undisturbed, then others for as long as prompts arrive.

    longest gap: the longest gap of each running answer, their median; a few long ones in hundreds of gaps move no p99.
    """
    calm = await closed_loop(client, _wave(dice), 4)
    prompts = [Job(prompt(dice, length), 16, at=2 + every_s * i) for i in range(3)]
    arriving = asyncio.create_task(open_loop(client, prompts))
    running: list[TimedAnswer] = []
    while not arriving.done():
        running += await closed_loop(client, _wave(dice), 4)
    answers = await arriving
    return {
        "itl p50": _ms(percentile(gaps(running), 50)),
        "itl p99": _ms(percentile(gaps(running), 99)),
        "longest gap": _ms(percentile([max(answer.gaps) for answer in running], 50)),
        "itl max": _ms(max(gaps(running))),
        "calm p99": _ms(percentile(gaps(calm), 99)),
        "ttft": percentile([answer.ttft for answer in answers], 50),
        "goodput": 100 * goodput([*running, *answers], TTFT_S, ITL_S),
    }


async def arriving(client: LoadClient, dice: random.Random) -> dict[str, float]:
    """POISSON_REQUESTS at random times, whether or not others are answered."""
    times = accumulate(dice.expovariate(POISSON_PER_S) for _ in range(POISSON_REQUESTS))
    jobs = [Job(prompt(dice, dice.randint(32, 384)), dice.randint(16, 96), at) for at in times]
    answers = await open_loop(client, jobs)
    ttfts = [answer.ttft for answer in answers]
    in_time = [answer.ttft <= POISSON_TTFT_S and answer.tpot <= POISSON_TPOT_S for answer in answers]
    return {
        "goodput": 100 * sum(in_time) / len(answers),
        "ttft p50": _ms(percentile(ttfts, 50)),
        "ttft p95": _ms(percentile(ttfts, 95)),
        "tpot p95": _ms(percentile([answer.tpot for answer in answers], 95)),
    }


async def behind(client: LoadClient, dice: random.Random) -> dict[str, float]:
    """4 long prompts at once; a short one comes each second while they are prefilled."""
    long = [Job(prompt(dice, 1536), 16) for _ in range(4)]
    short = [Job(prompt(dice, 64), 16, at=0.5 + second) for second in range(6)]
    answers = await open_loop(client, [*long, *short])
    ttfts = [answer.ttft for answer in answers]
    return {
        "short ttft p50": _ms(percentile(ttfts[4:], 50)),
        "short ttft max": _ms(max(ttfts[4:])),
        "long ttft p50": _ms(percentile(ttfts[:4], 50)),
        "long ttft max": _ms(max(ttfts[:4])),
    }


async def streams(client: LoadClient, dice: random.Random) -> dict[str, float]:
    answers = await closed_loop(client, [Job(prompt(dice, 32), 128) for _ in range(512)], 64)
    return {"output": throughput(answers), "itl p99": _ms(percentile(gaps(answers), 99))}


async def structured(client: LoadClient, dice: random.Random) -> dict[str, float]:
    """16 answers as they come, then 16 held to a JSON schema that none of them can end."""
    rates = []
    for held_to in ({}, {"response_format": RESPONSE_FORMAT}):
        asked = replace(client, extra={**client.extra, **held_to})
        answers = await closed_loop(asked, [Job(prompt(dice, 32), 64) for _ in range(16)], 16)
        rates.append(decode_rate(answers))
    free, held = rates
    return {"free": free, "held": held, "held/free": held / free}


async def batching(client: LoadClient, dice: random.Random) -> dict[str, float]:
    """The trace at its own arrival times, at most TRACE_SLOTS running: refilled at once, or batch by batch.

    A static batch is padded: an answer that has ended keeps its place, and computes, until the batch's longest ends;
    only the tokens that were asked for count. Its prompts are not padded, which favours it.
    """
    jobs = trace(dice)
    continuous = throughput(await in_slots(client, jobs, TRACE_SLOTS))
    padded = await in_batches(client, longest_of_each(trace(dice), TRACE_SLOTS), TRACE_SLOTS)
    static = sum(job.max_tokens for job in jobs) / wall(padded)
    return {"continuous": continuous, "static": static, "gain": continuous / static}


RATE = ("tok/s",)


def all_workloads() -> dict[str, Workload]:
    return {workload.name: workload for workload in (*_alone(), *_disturbed(), *_many())}


def _alone() -> tuple[Workload, ...]:
    """Equal requests, one or several at once."""
    return (
        Workload(
            "single", "Single stream: 64 tokens in, 128 out", LARGE,
            (Metric("decode", *RATE), Metric("itl p99", "ms", "lower")), single,
        ),
        Workload(
            "concurrent", "16 concurrent: 256 tokens in, 64 out", LARGE,
            (Metric("output", *RATE), Metric("ttft p50", "ms", "lower"), Metric("itl p99", "ms", "lower")), concurrent,
            (*BATCHING, "transformers"),
        ),
        Workload(
            "phase", "The decode phase of 16 sequences: 32 tokens in, 128 out", LARGE,
            (Metric("decode", *RATE), Metric("itl p99", "ms", "lower")), phase,
        ),
        Workload(
            "prefill", "A prompt of 1,024 tokens", LARGE,
            (Metric("prefill", *RATE), Metric("ttft", "ms", "lower")), prefill,
        ),
        Workload(
            "prefix", "16 requests with the 1,024 tokens of one before them, 32 of their own, 16 out", LARGE,
            (Metric("wall", "s", "lower"), Metric("first alone", "s", "lower")), prefix,
        ),
        Workload(
            "cached", "First token of 500 shared and 50 own tokens", LARGE,
            (Metric("cold", "ms", "lower"), Metric("warm", "ms", "lower"), Metric("gain", "x")), cached, SERVERS,
        ),
    )  # fmt: skip


def _disturbed() -> tuple[Workload, ...]:
    """Decodes beside prompts that arrive."""
    beside = (
        Metric("itl p50", "ms", "lower"), Metric("itl p99", "ms", "lower"), Metric("longest gap", "ms", "lower"),
        Metric("itl max", "ms", "lower"), Metric("calm p99", "ms", "lower"), Metric("ttft", "s", "lower"),
        Metric("goodput", "%"),
    )  # fmt: skip
    return (
        Workload(
            "disturbed", "4 decodes of 256 tokens while a prompt of 1,024 arrives every 8 s", LARGE,
            beside, disturbed, (*SERVERS, "vllm-256"),
        ),
        Workload(
            "longer", "4 decodes of 256 tokens while a prompt of 1,536 arrives every 6 s", LARGE,
            beside, partial(disturbed, length=1536, every_s=6), (*SERVERS, "vllm-256"),
        ),
        Workload(
            "poisson", f"{POISSON_PER_S} requests a second at random: 32 to 384 tokens in, 16 to 96 out", LARGE,
            (
                Metric("goodput", "%"), Metric("ttft p50", "ms", "lower"), Metric("ttft p95", "ms", "lower"),
                Metric("tpot p95", "ms", "lower"),
            ), arriving, BATCHING,
        ),
        Workload(
            "behind", "Prompts of 64 tokens, one a second, behind 4 of 1,536", LARGE,
            tuple(Metric(f"{what} ttft {of}", "ms", "lower") for what in ("short", "long") for of in ("p50", "max")),
            behind, BATCHING,
        ),
    )  # fmt: skip


def _many() -> tuple[Workload, ...]:
    """Many requests: over HTTP, held to a schema, or of a trace."""
    return (
        Workload(
            "streams", "14.7 M model, 64 streams over HTTP: 32 tokens in, 128 out", SMALL,
            (Metric("output", *RATE), Metric("itl p99", "ms", "lower")), streams, SERVERS,
        ),
        Workload(
            "structured", "16 sequences decode, free and held to a JSON schema: 32 tokens in, 64 out", LARGE,
            (Metric("free", *RATE), Metric("held", *RATE), Metric("held/free", "x")), structured, SERVERS,
        ),
        Workload(
            "batching", f"14.7 M model, {TRACE_REQUESTS:,} requests of Azure's trace, answers / {TRACE_SCALE}, "
            f"prompts / {PROMPT_SCALE}, {TRACE_SPEEDUP} times as fast, {TRACE_SLOTS} slots", SMALL,
            (Metric("continuous", *RATE), Metric("static", *RATE), Metric("gain", "x")), batching, SERVERS,
        ),
    )  # fmt: skip


def _wave(dice: random.Random) -> list[Job]:
    return [Job(prompt(dice, 64), 256) for _ in range(4)]


def longest_of_each(jobs: Sequence[Job], size: int) -> list[Job]:
    """The jobs in batches of `size`, every answer as long as its batch's longest."""
    batches = [jobs[first : first + size] for first in range(0, len(jobs), size)]
    longest = [max(job.max_tokens for job in batch) for batch in batches]
    return [replace(job, max_tokens=longest[place // size]) for place, job in enumerate(jobs)]


def trace(
    dice: random.Random, count: int = TRACE_REQUESTS, answers: int = TRACE_SCALE, prompts: int = PROMPT_SCALE
) -> list[Job]:
    """The first `count` requests of Azure's trace, lengths divided by `answers` and `prompts`, random tokens."""
    if not TRACE.is_file():
        raise FileNotFoundError(f"{TRACE} is missing: save {TRACE_SOURCE} there")
    with TRACE.open(encoding="utf-8") as rows:
        found = list(islice(csv.DictReader(rows), count))
    times = [datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp() for row in found]
    return [
        Job(
            prompt(dice, max(1, int(row["ContextTokens"]) // prompts)),
            max(1, int(row["GeneratedTokens"]) // answers),
            at=(at - times[0]) / TRACE_SPEEDUP,
        )
        for row, at in zip(found, times, strict=True)
    ]


def _ms(seconds: float) -> float:
    return 1000 * seconds
