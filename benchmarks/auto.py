"""`python -m benchmarks.auto`: does `auto` do as well as the best of always-remote and always-local prefill, and of as
many workers with one process for both?

1 mix       requests of Mooncake's trace by the kind of conversation they belong to, lengths scaled, Poisson arrivals;
            or, bursty, ten at a time behind one of a few system prompts
2 replay    the same requests at the same times through three gateways of one fleet of null engines, one after another,
            for some rounds; each time with a cache salt of its own, so none finds what another has cached; then through
            as many workers that each read and write by themselves
            --simulated: in made-up time, one round, which the machine's other work cannot touch
3 compare   goodput: the share of all requests whose TTFT and every ITL met the SLO. Of each policy the round of median
            goodput counts, for a pause of the machine can cost one round 5 %; benchmarks/out/auto.json keeps all
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import accumulate
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.fleet import MODEL, NullFleet, SimulatedWorker, running, simulate
from benchmarks.models import OUT
from benchmarks.results import earlier, percentile
from benchmarks.traffic import Replayed, TraceRequest, read_trace, replay, shaped
from tandem.engine import StepTime

RESULTS = OUT / "auto.json"
TTFT_S, ITL_S = 1.0, 0.100
GATEWAYS = {"remote": ("tandem", "require"), "local": ("local", "prefer"), "auto": ("tandem", "auto")}
ALONE = {"one process": ("tandem", "auto")}  # which has no prefill workers
# Slow enough that the machine's own noise is small beside it: 4,096 prompt tokens a second, 30 ms a decode step.
STEP_TIME = StepTime(prefill_tokens_per_s=4096, decode_step_s=0.030, decode_sequence_s=0.0003)
SHORT_TOKENS = 128
SECONDS, LOAD, MOST_PER_S, ROUNDS = 20.0, 0.3, 50.0, 3
# Kinds of conversation in a mix, each as often as the trace has it; see `kinds`.
MIXES = {
    "all": ("short", "long", "turns"),
    "short": ("short",),
    "long": ("long",),
    "turns": ("turns",),
    "bursty": (),
}
# Prefill and decode workers: as many of each, and too few to read everything.
FLEETS = {"4+4": (4, 4), "2+6": (2, 6)}


def main() -> None:
    options = _options()
    setting = {
        "rounds": options.rounds,
        "simulated": options.simulated,
        "load": options.load,
        "seconds": SECONDS,
        "ttft_s": TTFT_S,
        "itl_s": ITL_S,
    } | asdict(STEP_TIME)
    found = earlier(RESULTS, setting, "found")
    for name in options.fleets:
        measure = _simulate if options.simulated else _measure
        of_each = measure(*FLEETS[name], options.mixes, options.load, options.rounds)
        found[name] = found.get(name, {}) | of_each
        RESULTS.write_text(json.dumps({"setting": setting, "found": found}, indent=2), encoding="utf-8")
    _print(options.load, found)


def kinds(requests: Sequence[TraceRequest]) -> list[str]:
    """Kind of each: `turns` if its conversation (equal second blocks) has others in the trace, else `short` or `long`.

    All conversations begin with the same block of the trace.
    """
    sizes = Counter(request.blocks[1:2] for request in requests)

    def kind(request: TraceRequest) -> str:
        if request.blocks[1:2] and sizes[request.blocks[1:2]] > 1:
            return "turns"
        return "short" if request.prompt_tokens <= SHORT_TOKENS else "long"

    return [kind(request) for request in requests]


def mixed(
    trace: Sequence[TraceRequest], wanted: Sequence[str], capacity: float, seconds: float = SECONDS
) -> list[TraceRequest]:
    """The trace's first requests of the `wanted` kinds, in order, arriving at random for about `seconds`.

    So many that what no cache of any size could hold is `capacity` tokens a second, and at most MOST_PER_S a second.
    """
    chosen = _as_many(
        (request for request, kind in zip(trace, kinds(trace), strict=True) if kind in wanted), capacity, seconds
    )
    dice = random.Random(1)
    times = accumulate(dice.expovariate(len(chosen) / seconds) for _ in chosen)
    return [replace(request, at=at) for request, at in zip(chosen, times, strict=True)]


def bursty(capacity: float, seconds: float = SECONDS) -> list[TraceRequest]:
    """As `mixed`, of the shape `bursts`."""
    chosen = _as_many(shaped("bursts", round(MOST_PER_S * seconds), 1.0), capacity, seconds)
    return [replace(request, at=request.at * seconds / chosen[-1].at) for request in chosen]


def _as_many(requests: Iterable[TraceRequest], capacity: float, seconds: float) -> list[TraceRequest]:
    """The first of them that are `capacity` tokens a second."""
    chosen, cache, uncached = list[TraceRequest](), SimulatedWorker(10**9, 1.0), 0
    for request in requests:
        if uncached >= capacity * seconds or len(chosen) >= MOST_PER_S * seconds:
            break
        uncached += request.prompt_tokens - cache.read(request, len(chosen))
        chosen.append(request)
    return chosen


def _measure(prefill: int, decode: int, mixes: Sequence[str], load: float, rounds: int) -> dict[str, Any]:
    warm_up, requests = _requests(prefill + decode, mixes, load)
    parts = asyncio.run(_run(prefill, decode, GATEWAYS, warm_up, requests, rounds))
    alone = asyncio.run(_run(0, prefill + decode, ALONE, warm_up, requests, rounds))
    return {mix: alone[mix] | parts[mix] for mix in mixes}


def _simulate(prefill: int, decode: int, mixes: Sequence[str], load: float, _: int) -> dict[str, Any]:
    warm_up, requests = _requests(prefill + decode, mixes, load)
    fleets = {name: _fleet(0, prefill + decode, [gateway]) for name, gateway in ALONE.items()}
    fleets |= {name: _fleet(prefill, decode, [gateway]) for name, gateway in GATEWAYS.items()}
    return {
        mix: {name: middle([figures(simulate(fleet, warm_up, asked))]) for name, fleet in fleets.items()}
        for mix, asked in requests.items()
    }


def _requests(
    workers: int, mixes: Sequence[str], load: float
) -> tuple[list[TraceRequest], dict[str, list[TraceRequest]]]:
    """Those that come before, so that every worker has measured itself; and of each mix."""
    trace, capacity = read_trace(1.0), load * workers * STEP_TIME.prefill_tokens_per_s
    of_each = {mix: mixed(trace, MIXES[mix], capacity) if MIXES[mix] else bursty(capacity) for mix in mixes}
    return mixed(trace, MIXES["all"], capacity, 5.0), of_each


def _fleet(prefill: int, decode: int, gateways: Iterable[tuple[str, str]]) -> NullFleet:
    goal = {"classes": {"interactive": {"ttft_s": TTFT_S, "itl_s": ITL_S}}}
    return NullFleet(prefill, decode, gateways=tuple(gateways), step_time=STEP_TIME, gateway_settings=goal)


async def _run(
    prefill: int, decode: int, policies: Mapping[str, tuple[str, str]], warm_up: Sequence[TraceRequest],
    requests: Mapping[str, Sequence[TraceRequest]], rounds: int,
) -> dict[str, Any]:  # fmt: skip
    async with running(_fleet(prefill, decode, policies.values())) as addresses:
        gateways = dict(zip(policies, (address.grpc for address in addresses), strict=True))
        for name, address in gateways.items():
            await replay(warm_up, [address], MODEL, f"warm-up {name}")
        return {mix: await _compare(asked, gateways, mix, rounds) for mix, asked in requests.items()}


async def _compare(
    requests: Sequence[TraceRequest], gateways: Mapping[str, str], mix: str, rounds: int
) -> dict[str, Any]:
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in gateways}
    for number in range(rounds):
        for name, address in gateways.items():
            runs[name].append(figures(await replay(requests, [address], MODEL, f"{mix} {name} {number}")))
    return {name: middle(found) for name, found in runs.items()}


def middle(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The run of median goodput (of two, the worse), and the goodput of all."""
    in_order = sorted(runs, key=lambda run: float(run["goodput"]))
    return in_order[(len(runs) - 1) // 2] | {"goodputs": [run["goodput"] for run in runs]}


def figures(replayed: Sequence[Replayed]) -> dict[str, Any]:
    """Figures of one replay; a request that was not answered is not good."""
    answers = [one.answer for one in replayed if one.answer]
    ttfts, gaps = [answer.ttft for answer in answers], [gap for answer in answers for gap in answer.gaps] or [0.0]
    return {
        "requests": len(replayed),
        "errors": dict(Counter(one.error for one in replayed if one.error).most_common(5)),
        "goodput": sum(answer.meets(TTFT_S, ITL_S) for answer in answers) / len(replayed),
        "in_time_ttft": sum(ttft <= TTFT_S for ttft in ttfts) / len(replayed),
        "ttft_p50_ms": 1000 * percentile(ttfts, 50),
        "ttft_p99_ms": 1000 * percentile(ttfts, 99),
        "itl_p99_ms": 1000 * percentile(gaps, 99),
        "local": sum(not one.remote for one in replayed) / len(replayed),
    }


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.auto", description=__doc__.splitlines()[0])
    known = list(MIXES)
    parser.add_argument("--mixes", type=lambda text: text.split(","), default=known, help=", ".join(known))
    fleets = list(FLEETS)
    parser.add_argument("--fleets", type=lambda text: text.split(","), default=fleets, help=", ".join(fleets))
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="of all policies, one after the other")
    parser.add_argument("--simulated", action="store_true", help="in made-up time, one round")
    parser.add_argument("--load", type=float, default=LOAD, help="prompt tokens to prefill, of what all workers could")
    return parser.parse_args()


def _print(load: float, found: Mapping[str, Any]) -> None:
    console = Console(width=160)
    console.print(f"goodput: TTFT within {TTFT_S:g} s, every ITL within {1000 * ITL_S:g} ms")
    console.print(f"load: {load:g} of what all workers could read, at most {MOST_PER_S:g} requests a second")
    columns = ("auto / best", "read locally", "TTFT p99 ms", "ITL p99 ms")
    table = Table("fleet, mix", "requests", *ALONE, *GATEWAYS, *columns)
    for fleet, mixes in found.items():
        for mix, runs in mixes.items():
            table.add_row(f"{fleet} {mix}", *_row(runs))
    console.print(table)


def _row(runs: Mapping[str, Any]) -> list[str]:
    def each(figure: str) -> str:
        return ", ".join(f"{run[figure]:.0f}" for run in runs.values())

    best = max(run["goodput"] for name, run in runs.items() if name != "auto")
    goodputs = [_goodput(run) for run in runs.values()]
    ratio = runs["auto"]["goodput"] / best if best else 1.0
    local = f"{100 * runs['auto']['local']:.0f} %"
    return [str(runs["auto"]["requests"]), *goodputs, f"{ratio:.3f}", local, each("ttft_p99_ms"), each("itl_p99_ms")]


def _goodput(run: Mapping[str, Any]) -> str:
    """Goodput of the round that counts, then of all rounds."""
    rounds = " ".join(f"{100 * goodput:.0f}" for goodput in run["goodputs"])
    return f"{100 * run['goodput']:.1f} % ({rounds})"


if __name__ == "__main__":
    main()
