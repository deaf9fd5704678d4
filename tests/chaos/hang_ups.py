"""`python -m tests.chaos.hang_ups 2000`: streams of a real cluster, each hung up within a moment; then nothing is held.

Null engines; prints how long after the last one nothing was held any more, and exits with 1 where that took over 2 s.
"""

from __future__ import annotations

import asyncio
import random
import sys
import tempfile
import time
from pathlib import Path

import httpx

from tests.chaos.soak import DEMO, held
from tests.e2e.cluster import BOUND_S, RunningCluster, eventually, running_cluster

AT_ONCE, LONGEST_S, RELEASED_S = 24, 0.8, 2.0
OPTIONS = (f"--model-path={DEMO}", "--engine=null", "--model-name=null", "--prefill=2", "--decode=2")


async def hang_up(cluster: RunningCluster, count: int, dice: random.Random) -> None:
    """Ends once the last of them has been hung up."""
    limits = httpx.Limits(max_connections=AT_ONCE)
    async with httpx.AsyncClient(base_url=cluster.http, timeout=30, limits=limits) as client:

        async def one() -> None:
            prompt = dice.choices(range(1, 4000), k=dice.randint(1, 200))
            body = {"model": "null", "prompt": prompt, "max_tokens": 1000, "ignore_eos": True, "stream": True}
            async with client.stream("POST", "/v1/completions", json=body) as answer:
                async for _ in answer.aiter_bytes():
                    pass

        async def several() -> None:
            for _ in range(-(-count // AT_ONCE)):
                asking = asyncio.create_task(one())
                await asyncio.wait({asking}, timeout=dice.uniform(0, LONGEST_S))
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)

        await asyncio.gather(*(several() for _ in range(AT_ONCE)))


def run(count: int) -> tuple[float, list[str]]:
    """The seconds until nothing was held any more, and what still was after RELEASED_S."""
    with tempfile.TemporaryDirectory() as folder, running_cluster(Path(folder), *OPTIONS) as cluster:
        eventually(lambda: linked_pairs(cluster) == 4, BOUND_S, "every pair is linked")
        asyncio.run(hang_up(cluster, count, random.Random(0)))
        began = time.monotonic()
        while left := asyncio.run(held(cluster)):
            if time.monotonic() - began > RELEASED_S:
                break
        return time.monotonic() - began, left


def linked_pairs(cluster: RunningCluster) -> int:
    return int(httpx.get(f"{cluster.http}/health/ready").json()["linked_pairs"])


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 2000
    seconds, left = run(count)
    print(f"{count} streams hung up; all whole {seconds:.2f} s after the last", *left, sep="\n")
    sys.exit(bool(left))


if __name__ == "__main__":
    main()
