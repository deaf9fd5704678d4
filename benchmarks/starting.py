"""`python -m benchmarks.starting`: how soon each service is ready, with the demo model, alone on one core; in seconds.

Workers are ready when the registry names them, a gateway when it would answer a request. What is compiled once lies
there already, as in an image: the first round is left out.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections import defaultdict
from contextlib import ExitStack
from statistics import median

import httpx

from benchmarks.models import OUT
from benchmarks.peers import started
from tandem.commands.up import DEMO_MODEL
from tandem.local import RedisServer, free_ports
from tandem.registry import Registry, Role

ROUNDS, CORE, LOOK_S, BOUND_S = 5, 0, 0.01, 60.0
WORKER = (f"--model-path={DEMO_MODEL}", "--model-name=demo", "--threads=1")


def main() -> None:
    took = defaultdict[str, list[float]](list)
    for number in range(ROUNDS + 1):
        for service, seconds in asyncio.run(a_round()).items():
            took[service] += [seconds] if number else []
    for service, found in took.items():
        print(f"{service:8} {median(found):.2f} ({min(found):.2f} to {max(found):.2f})")


async def a_round() -> dict[str, float]:
    """Returns each service's seconds; they start one after another, the others being idle."""
    found: dict[str, float] = {}
    with ExitStack() as stack:
        redis = stack.enter_context(RedisServer.start())
        registry = Registry.connect(redis.url)
        for role in (Role.DECODE, Role.PREFILL):
            begun = begin(stack, role.lower(), f"--redis-url={redis.url}", f"--grpc-port={free_ports(1)[0]}", *WORKER)
            while not any(worker.info.role is role for worker in await registry.workers()):
                await pause(begun)
            found[role.lower()] = asyncio.get_running_loop().time() - begun
        port = free_ports(1)[0]
        begun = begin(stack, "gateway", f"--redis-url={redis.url}", f"--http-port={port}", "--grpc-port=0")
        while not await is_ready(port):
            await pause(begun)
        found["gateway"] = asyncio.get_running_loop().time() - begun
        await registry.close()
    return found


def begin(stack: ExitStack, service: str, *options: str) -> float:
    log = OUT / "logs" / "starting" / f"{service}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = {"PYTHONDONTWRITEBYTECODE": ""}
    begun = asyncio.get_running_loop().time()
    process: subprocess.Popen[bytes] = stack.enter_context(
        started([sys.executable, "-m", f"services.{service}", *options], log, environment)
    )
    os.sched_setaffinity(process.pid, {CORE})
    return begun


async def is_ready(port: int) -> bool:
    try:
        async with httpx.AsyncClient(trust_env=False) as client:
            return (await client.get(f"http://127.0.0.1:{port}/health/ready")).status_code == 200
    except httpx.TransportError:
        return False


async def pause(begun: float) -> None:
    if asyncio.get_running_loop().time() > begun + BOUND_S:
        raise SystemExit(f"not ready within {BOUND_S:.0f} s: {OUT / 'logs' / 'starting'}")
    await asyncio.sleep(LOOK_S)


if __name__ == "__main__":
    main()
