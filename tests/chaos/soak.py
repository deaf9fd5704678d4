"""`python -m tests.chaos.soak`, `make soak`: mixed traffic on real processes, for long, while workers are replaced.

Callers ask the same questions again and again: answered whole, streamed, with deadlines too short, or left in the
middle. At each interval a worker is killed, told to end, or stopped for some seconds, in turn. Prints a table, and
exits with 1 where an answer failed or differed, where a part holds what nothing accounts for, or where memory,
descriptors, tasks or keys of Redis grow.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path

import httpx
import psutil
from redis.asyncio import Redis

from tandem.commands.doctor import DoctorSettings, examine
from tests.e2e.cluster import BOUND_S, RunningCluster, eventually, running_cluster, runs

DEMO = Path(__file__).parents[2] / "models" / "demo" / "target"
QUESTIONS, CALLERS = 64, 24
STOPPED_S, SETTLE_S, SAMPLE_S = 4.0, 10.0, 5.0
# Growth below this is noise: allocators round, caches fill.
MEMORY_MIB_PER_MIN, MEMORY_MIB = 1.0, 16.0
SPARE = {"fds": 24, "tasks": 24, "keys": 64}
OPTIONS = ("--engine=null", "--model-name=null", "--prefill=2", "--decode=3", "--drain-s=1", "--null-speedup=0.5")


@dataclass
class Sample:
    """Memory in MiB, and counts, of the processes that are not replaced."""

    at: float
    memory: float
    fds: int
    tasks: int
    keys: int  # without those that expire: of deaths, fences and withdrawn reservations


@dataclass
class Soak:
    cluster: RunningCluster
    until: float
    dice: random.Random
    counts: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    texts: dict[int, str] = field(default_factory=dict)

    async def run(self, interval_s: float, kinds: list[str]) -> None:
        async with httpx.AsyncClient(base_url=self.cluster.http, timeout=90) as client:
            await self._sample(client)
            callers = [asyncio.create_task(self._call(client)) for _ in range(CALLERS)]
            watching = asyncio.create_task(self._watch(client))
            for kind in cycle(kinds):
                await asyncio.sleep(min(interval_s, max(0.0, self.until - time.monotonic())))
                if time.monotonic() >= self.until:
                    break
                await self._replace(kind)
            await asyncio.gather(*callers)
            watching.cancel()
            await self._settle()
            await self._sample(client)
        self._judge_growth()

    # --- traffic ---

    async def _call(self, client: httpx.AsyncClient) -> None:
        while time.monotonic() < self.until:
            number = self.dice.randrange(QUESTIONS)
            kind = self.dice.choices(("whole", "streamed", "left", "late"), (4, 4, 4, 1))[0]
            asking = asyncio.create_task(self._ask(client, number, kind))
            if kind == "left":
                await asyncio.wait({asking}, timeout=self.dice.uniform(0, 0.6))
                asking.cancel()
            try:
                await asking
                self.counts["answered" if kind == "left" else kind] += 1
            except asyncio.CancelledError:
                self.counts["left"] += 1
            except (httpx.HTTPError, ValueError) as error:
                self.counts["failed"] += 1
                self.violations.append(f"question {number}, {kind}: {error!r}")

    async def _ask(self, client: httpx.AsyncClient, number: int, kind: str) -> None:
        question = random.Random(number)
        body = {
            "model": "null", "prompt": question.choices(range(1, 4000), k=question.randint(1, 60)), "seed": number,
            "max_tokens": question.choice((1, 5, 20, 60)), "temperature": float(number % 2), "ignore_eos": True,
        }  # fmt: skip
        if kind == "late":
            answer = await client.post("/v1/completions", json=body, headers={"x-request-timeout-ms": "5"})
            if answer.status_code not in (200, 504):
                raise ValueError(f"{answer.status_code}: {answer.text}")
        elif kind == "whole":
            answer = await client.post("/v1/completions", json=body)
            if answer.status_code != 200:
                raise ValueError(f"{answer.status_code}: {answer.text}")
            self._compare(number, answer.json()["choices"][0]["text"])
        else:
            await self._read(client, body | {"stream": True}, number)

    async def _read(self, client: httpx.AsyncClient, body: dict[str, object], number: int) -> None:
        text, last = "", ""
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    event = httpx.Response(200, content=line[6:]).json()
                    if "error" in event:
                        raise ValueError(str(event["error"]))
                    text += "".join(choice["text"] for choice in event["choices"])
                last = line or last
        if last != "data: [DONE]":
            raise ValueError(f"{answer.status_code}, and the stream ends with {last!r}")
        self._compare(number, text)

    def _compare(self, number: int, text: str) -> None:
        if text != self.texts.setdefault(number, text):
            raise ValueError(f"{text!r} now, {self.texts[number]!r} before")

    # --- faults ---

    async def _replace(self, kind: str) -> None:
        workers = self.cluster.pids("decode") + self.cluster.pids("prefill")
        pid = self.dice.choice(workers)
        self.counts[kind] += 1
        with suppress(ProcessLookupError):
            os.kill(pid, {"kill": signal.SIGKILL, "end": signal.SIGTERM, "stop": signal.SIGSTOP}[kind])
            if kind == "stop":
                await asyncio.sleep(STOPPED_S)
                os.kill(pid, signal.SIGCONT)

    # --- what is held ---

    async def _watch(self, client: httpx.AsyncClient) -> None:
        while True:
            await asyncio.sleep(SAMPLE_S)
            await self._sample(client)

    async def _sample(self, client: httpx.AsyncClient) -> None:
        lasting = [p for p in self._processes() if runs(p, "gateway") or runs(p, "kvstore") or "redis" in p.name()]
        held = (await client.get("/debug/integrity")).json()
        self.violations += [f"gateway: {text}" for text in held["violations"]]
        async with Redis.from_url(self.cluster.redis_url) as redis:
            keys = [await redis.ttl(key) for key in [key async for key in redis.scan_iter()]].count(-1)
        memory = sum(p.memory_info().rss for p in lasting) / 2**20
        fds = sum(p.num_fds() for p in lasting)
        self.samples.append(Sample(time.monotonic(), memory, fds, held["held"]["tasks"], keys))

    def _processes(self) -> list[psutil.Process]:
        return psutil.Process(self.cluster.process.pid).children(recursive=True)

    async def _settle(self) -> None:
        """Nothing is held any more, in any process, within SETTLE_S of the last worker's return."""
        await asyncio.to_thread(eventually, lambda: self._whole(), BOUND_S, "all workers are back")
        until = time.monotonic() + SETTLE_S
        while broken := await held(self.cluster):
            if time.monotonic() > until:
                self.violations += broken
                return
            await asyncio.sleep(0.5)

    def _whole(self) -> bool:
        with suppress(httpx.HTTPError):
            return bool(httpx.get(f"{self.cluster.http}/health/ready", timeout=5).json()["linked_pairs"] == 6)
        return False

    def _judge_growth(self) -> None:
        """Between the first half's end and the last sample, when caches are full."""
        half = self.samples[len(self.samples) // 2 :]
        slope = _slope([(s.at / 60, s.memory) for s in half])
        grown = slope * (half[-1].at - half[0].at) / 60
        if slope > MEMORY_MIB_PER_MIN and grown > MEMORY_MIB:
            self.violations.append(f"memory grows by {slope:.1f} MiB a minute")
        for what, spare in SPARE.items():
            first, last = getattr(self.samples[0], what), getattr(self.samples[-1], what)
            if last > first + spare:
                self.violations.append(f"{what}: {last}, and {first} at the beginning")

    def table(self) -> str:
        rows = ["   min   MiB  fds  tasks  keys"]
        shown = self.samples[:: max(1, len(self.samples) // 20)] + self.samples[-1:]
        rows += [
            f"{(s.at - self.samples[0].at) / 60:6.1f} {s.memory:5.0f} {s.fds:4} {s.tasks:6} {s.keys:5}" for s in shown
        ]
        half = self.samples[len(self.samples) // 2 :]
        rows.append(f"memory, second half: {_slope([(s.at / 60, s.memory) for s in half]):+.2f} MiB a minute")
        rows.append(", ".join(f"{count} {what}" for what, count in self.counts.most_common()))
        return "\n".join([*rows, *(f"VIOLATION {text}" for text in self.violations[:50])])


async def held(cluster: RunningCluster) -> list[str]:
    """One line for each process that holds anything for a request, or finds a violation."""
    doctor = DoctorSettings(redis_url=cluster.redis_url, gateway_url=cluster.http, integrity=True)
    return [
        f"{found.what}: {found.detail}" for found in await examine(doctor) if not _is_clean(found.what, found.detail)
    ]


def _is_clean(what: str, detail: str) -> bool:
    """True unless an integrity finding says that something is held; the other findings do not matter here."""
    if not what.endswith(", integrity"):
        return True
    held, *violations = detail.split("; ")
    lasting = ("leases", "clients", "connections", "kv_links", "tasks")
    idle = (part.startswith("0 ") or part.endswith(lasting) for part in held.split(", "))
    return not violations and all(idle)


def _slope(points: list[tuple[float, float]]) -> float:
    """The slope of the line of least squares."""
    n = len(points)
    x, y = sum(p[0] for p in points) / n, sum(p[1] for p in points) / n
    spread = sum((p[0] - x) ** 2 for p in points)
    return sum((p[0] - x) * (p[1] - y) for p in points) / spread if spread else 0.0


def soak(minutes: float, interval_s: float, kinds: list[str], seed: int) -> Soak:
    with tempfile.TemporaryDirectory() as folder:
        options = (f"--model-path={DEMO}", *OPTIONS)
        with running_cluster(Path(folder), *options) as cluster:
            run = Soak(cluster, time.monotonic() + 60 * minutes, random.Random(seed))
            eventually(run._whole, BOUND_S, "every pair is linked")
            asyncio.run(run.run(interval_s, kinds))
            return run


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.soak")
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--interval-s", type=float, default=60, help="seconds between two workers' replacements")
    parser.add_argument("--kinds", default="kill,end,stop", help="what is done to them, in turn")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    run = soak(arguments.minutes, arguments.interval_s, arguments.kinds.split(","), arguments.seed)
    print(run.table())
    sys.exit(bool(run.violations))


if __name__ == "__main__":
    main()
