"""`python -m benchmarks.gateway`: what a gateway makes of a core, beside other fronts.

Each front (benchmarks/frontends) on core 0, its backend and the clients on core 1; backends compute nothing.

requests    of one token, 512 at once
chats       as requests, of two messages that the model's template renders: CPU of the front's helper processes, too
streams     512 answers of 200 tokens, as fast as the front passes tokens on
delay       of a token, from its backend's writing it to its client's reading it: streams of a token each 20 ms
held        2,000 streams at once, a token each second

CPU is the front's own, so other load on the machine changes it little; the rates are what this machine's minute gave.
Rounds go in turns over the fronts.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import uvloop
from rich.console import Console
from rich.table import Table

from benchmarks.frontends import FRONTS, BackendPace, Front, RunningFront
from benchmarks.peers import PeerUnavailable
from benchmarks.results import percentile
from tandem.commands.up import DEMO_MODEL

FRONT_CORE, OTHER_CORE = {0}, {1}
REQUESTS, AT_ONCE = 4000, 512
STREAM_TOKENS = 200
STEP_S, DELAY_STREAMS, DELAY_TOKENS = 0.02, (16, 200), 150
HELD, HELD_STEP_S, HELD_TOKENS = 2000, 1.0, 6
LOADS = ("requests", "chats", "streams", "delay", "held")
Figures = dict[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gateway")
    parser.add_argument("--fronts", default="tandem,sglang-router,dynamo", help="in turns")
    parser.add_argument("--loads", default=",".join(LOADS))
    parser.add_argument("--rounds", type=int, default=1)
    arguments = parser.parse_args()
    names, loads = arguments.fronts.split(","), arguments.loads.split(",")
    found: dict[str, defaultdict[str, list[float]]] = {name: defaultdict(list) for name in names}
    for _ in range(arguments.rounds):
        for name in names:
            try:
                for figure, value in uvloop.run(measured(FRONTS[name], loads)).items():
                    found[name][figure].append(value)
            except PeerUnavailable as error:
                print(f"{FRONTS[name].title}: {error}")
    report({name: found[name] for name in names if found[name]})


async def measured(front: Front, loads: Sequence[str]) -> Figures:
    os.sched_setaffinity(0, OTHER_CORE)
    figures: Figures = {}
    pace = BackendPace()
    async with front.running(DEMO_MODEL, pace) as running:
        pin(running.process)
        await running.load.run(AT_ONCE, 1, AT_ONCE)
        gc.collect()
        gc.freeze()
        for name in loads:
            figures |= await MEASURES[name](front, running, pace)
    return figures


async def requests(front: Front, running: RunningFront, pace: BackendPace) -> Figures:
    before = cpu_s(running.process)
    seen = await running.load.run(REQUESTS, 1, AT_ONCE)
    cpu = cpu_s(running.process) - before
    return {
        "requests/s": REQUESTS / seen.seconds,
        "CPU of a request, ms": 1000 * cpu / REQUESTS,
        "requests a CPU second": REQUESTS / cpu,
    }


async def chats(front: Front, running: RunningFront, pace: BackendPace) -> Figures:
    def spent_s() -> float:
        return sum(map(cpu_s, (running.process, *running.process.children(recursive=True))))

    await running.load.run(AT_ONCE, 1, AT_ONCE, chat=True)  # Helpers start when they are asked for.
    before = spent_s()
    seen = await running.load.run(REQUESTS, 1, AT_ONCE, chat=True)
    return {"chats/s": REQUESTS / seen.seconds, "CPU of a chat, ms": 1000 * (spent_s() - before) / REQUESTS}


async def streams(front: Front, running: RunningFront, pace: BackendPace) -> Figures:
    pace.step_s, before = 0.0, cpu_s(running.process)
    seen = await running.load.run(AT_ONCE, STREAM_TOKENS, AT_ONCE)
    cpu, tokens = cpu_s(running.process) - before, AT_ONCE * STREAM_TOKENS
    return {
        "streamed tokens/s": tokens / seen.seconds,
        "streamed tokens a CPU second": tokens / cpu,
        "tokens an event": seen.tokens_an_event(),
    }


async def delay(front: Front, running: RunningFront, pace: BackendPace) -> Figures:
    figures: Figures = {}
    pace.step_s = STEP_S
    for count in DELAY_STREAMS:
        before = cpu_s(running.process)
        seen = await running.load.run(count, DELAY_TOKENS, count)
        cpu = cpu_s(running.process) - before
        if front.stamps:
            delays = seen.delays_ms(pace)
            for percent in (50, 99):
                figures[f"delay of a token p{percent}, {count} streams, ms"] = percentile(delays, percent)
        figures[f"CPU of a token, {count} streams, us"] = 1e6 * cpu / (count * DELAY_TOKENS)
    return figures


async def held(front: Front, running: RunningFront, pace: BackendPace) -> Figures:
    pace.step_s = HELD_STEP_S
    seen = await running.load.run(HELD, HELD_TOKENS, HELD)
    return {
        f"TTFT p50, {HELD} streams, s": seen.ttft_ms(50) / 1000,
        "most memory, MB": peak_mb(running.process),
    }


MEASURES = {"requests": requests, "chats": chats, "streams": streams, "delay": delay, "held": held}


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def peak_mb(process: psutil.Process) -> float:
    """The most that was resident since it started."""
    status = Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8")
    kib = next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]
    return int(kib) * 1024 / 1e6


def pin(process: psutil.Process) -> None:
    for thread in process.threads():
        os.sched_setaffinity(thread.id, FRONT_CORE)


def report(found: dict[str, defaultdict[str, list[float]]]) -> None:
    table = Table("", *(FRONTS[name].title for name in found))
    for figure in dict.fromkeys(figure for values in found.values() for figure in values):
        table.add_row(figure, *(shown(values.get(figure, [])) for values in found.values()))
    Console().print(table)
    for name in found:
        print(f"{FRONTS[name].title}: {FRONTS[name].does}")


def shown(values: Sequence[float]) -> str:
    """The median, and all of them in their order."""
    if not values:
        return "-"
    digits = 0 if statistics.median(values) >= 100 else 2
    every = f" ({', '.join(f'{value:,.{digits}f}' for value in values)})" if len(values) > 1 else ""
    return f"{statistics.median(values):,.{digits}f}{every}"


if __name__ == "__main__":
    main()
