"""What a request costs each process of a cluster with the null engine, its steps taking no time.

Each answer is streamed, read by clients that keep so many requests running. CPU time is read from the processes
themselves. Options that it does not know are the cluster's: `--null-speedup=1` for streams that last.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil  # type: ignore[import-untyped]
from rich.console import Console
from rich.table import Table

from benchmarks.load import Client, Job, closed_loop
from benchmarks.models import OUT
from benchmarks.peers import tandem
from benchmarks.results import percentile
from tandem.commands.up import DEMO_MODEL

PROMPT_TOKENS = 16
SERVICES = ("gateway", "prefill", "decode", "kvstore")


def measure_cluster(words: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gateway --cluster")
    parser.add_argument("--prefill", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=1, help="of each answer")
    parser.add_argument("--concurrency", type=int, default=256)
    parser.add_argument("--requests", type=int, default=2500)
    parser.add_argument("--pin", action="store_true", help="the gateway on core 0, everything else on core 1")
    arguments, others = parser.parse_known_args(words)
    OUT.mkdir(parents=True, exist_ok=True)
    options = (
        "--engine=null", "--null-speedup=100000", f"--prefill={arguments.prefill}", "--model-name=target",
        f"--disaggregation={'require' if arguments.prefill else 'auto'}", "--decode-kv-memory=64MiB",
        *others,
    )  # fmt: skip
    with tandem("tandem-null", "Tandem, null engine", *options).running(DEMO_MODEL) as client:
        processes = services()
        if arguments.pin:
            pin(processes)
        asyncio.run(closed_loop(client, jobs(arguments.concurrency, arguments.tokens), arguments.concurrency))
        report(client, processes, arguments.requests, arguments.tokens, arguments.concurrency)


def report(client: Client, processes: dict[str, psutil.Process], count: int, tokens: int, concurrency: int) -> None:
    before = {name: cpu_s(process) for name, process in processes.items()}
    answers = asyncio.run(closed_loop(client, jobs(count, tokens), concurrency))
    seconds = max(answer.arrivals[-1].at for answer in answers) - min(answer.sent for answer in answers)
    ttft = [answer.arrivals[0].at - answer.sent for answer in answers]
    table = Table("", f"{count} requests of {tokens} tokens, {concurrency} at once")
    table.add_row("requests/s", f"{count / seconds:,.0f}")
    table.add_row("tokens/s", f"{count * tokens / seconds:,.0f}")
    table.add_row("TTFT p50, ms", f"{1000 * percentile(ttft, 50):.0f}")
    for name, process in processes.items():
        table.add_row(f"{name}: CPU of a request, ms", f"{1000 * (cpu_s(process) - before[name]) / count:.2f}")
    table.add_row("gateway: most memory, MB", f"{peak_mb(processes['gateway']):.0f}")
    Console().print(table)


def services() -> dict[str, psutil.Process]:
    """Processes below this one, by the service they are."""
    found: dict[str, psutil.Process] = {}
    for process in psutil.Process().children(recursive=True):
        words = " ".join(process.cmdline())
        found |= {name: process for name in SERVICES if f"services.{name}" in words}
        if "redis-server" in words:
            found["redis"] = process
    return found


def pin(processes: dict[str, psutil.Process]) -> None:
    os.sched_setaffinity(0, {1})
    for name, process in processes.items():
        for thread in process.threads():
            with suppress(ProcessLookupError):
                os.sched_setaffinity(thread.id, {0 if name == "gateway" else 1})


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def peak_mb(process: psutil.Process) -> float:
    """The most that was resident since it started."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    kib = next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]
    return int(kib) * 1024 / 1e6


def jobs(count: int, tokens: int) -> list[Job]:
    dice = random.Random(count)
    return [Job(dice.choices(range(300, 4000), k=PROMPT_TOKENS), tokens) for _ in range(count)]
