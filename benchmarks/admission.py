"""`python -m benchmarks.admission`: 128 short prompts at once where a step takes 20 ms: when each has its first token.

Null engines, 4,096 prompt tokens a second; one process and 1P+1D, each started anew. So many answers as `--running`
says are under way when the burst comes, so that there is always a step running.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics

from rich.console import Console
from rich.table import Table

from benchmarks.load import Client, Job, open_loop
from benchmarks.models import OUT
from benchmarks.peers import Peer, tandem
from benchmarks.results import percentile
from benchmarks.workloads import prompt
from tandem.commands.up import DEMO_MODEL

NULL = ("--engine=null", "--null-speedup=0.5", "--model-name=target")
BURST, PROMPT_TOKENS, NEW_TOKENS = 128, 32, 16


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.admission", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--running", type=int, default=16, help="answers under way when the burst comes")
    options = parser.parse_args()
    OUT.mkdir(parents=True, exist_ok=True)
    peers = (
        tandem("null", "one process", "--prefill=0", "--decode=1", *NULL),
        tandem("null-1p1d", "1 prefill + 1 decode", "--prefill=1", "--decode=1", "--disaggregation=require", *NULL),
    )
    table = Table("", "TTFT p50, ms, each round", "p99", "median of p50")
    for peer in peers:
        p50, p99 = zip(*(measured(peer, number, options.running) for number in range(options.rounds)), strict=True)
        table.add_row(
            peer.title, *(", ".join(f"{ms:.0f}" for ms in all_) for all_ in (p50, p99)), f"{statistics.median(p50):.0f}"
        )
    Console().print(table)


def measured(peer: Peer, number: int, running: int) -> tuple[float, float]:
    """The second of two bursts: the first is for warming up."""
    with peer.running(DEMO_MODEL) as client:
        return [asyncio.run(burst(client, random.Random(2 * number + i), running)) for i in range(2)][-1]


async def burst(client: Client, dice: random.Random, running: int) -> tuple[float, float]:
    under_way = [Job(prompt(dice, PROMPT_TOKENS), 200) for _ in range(running)]
    at_once = [Job(prompt(dice, PROMPT_TOKENS), NEW_TOKENS, at=2.0) for _ in range(BURST)]
    answers = (await open_loop(client, [*under_way, *at_once]))[running:]
    ttfts = [answer.ttft for answer in answers]
    return 1000 * percentile(ttfts, 50), 1000 * percentile(ttfts, 99)


if __name__ == "__main__":
    main()
