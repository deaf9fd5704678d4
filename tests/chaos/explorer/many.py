"""Many schedules, on several cores: each job is a process with a redis-server of its own."""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from pathlib import Path

from tandem.local import RedisServer
from tests.chaos.explorer.run import Explorer
from tests.chaos.explorer.schedule import KINDS, schedule_of
from tests.chaos.explorer.waits import WAITS
from tests.simulation.redis import RedisStore

COLLECT_EVERY = 20


@dataclass
class ExplorerReport:
    num_run: int = 0
    seconds: float = 0.0
    simulated_s: float = 0.0
    fired: Counter[str] = field(default_factory=Counter)
    waits: Counter[str] = field(default_factory=Counter)
    codes: Counter[str] = field(default_factory=Counter)
    failed: dict[int, list[str]] = field(default_factory=dict)

    def add(self, other: ExplorerReport) -> None:
        self.num_run += other.num_run
        self.simulated_s += other.simulated_s
        self.fired += other.fired
        self.waits += other.waits
        self.codes += other.codes
        self.failed |= other.failed


def explore(model: Path, seeds: Sequence[int], *, jobs: int | None = 1, kinds: Sequence[str] = ()) -> ExplorerReport:
    """Run the schedules of these seeds, of all kinds of faults or `kinds`."""
    began = time.monotonic()
    report = ExplorerReport()
    jobs = jobs or 1
    work = partial(run_some, model, kinds=kinds)
    if jobs == 1:
        report.add(work(seeds))
    else:
        with ProcessPoolExecutor(jobs, mp_context=get_context("forkserver")) as pool:
            for part in pool.map(work, [seeds[i::jobs] for i in range(jobs)]):
                report.add(part)
    report.seconds = time.monotonic() - began
    return report


def run_some(model: Path, seeds: Iterable[int], kinds: Sequence[str] = ()) -> ExplorerReport:
    report = ExplorerReport()
    gc.disable()  # when it runs would depend on what ran before
    with RedisServer.start() as server, RedisStore(server.port) as store:
        explorer = Explorer(store, model)
        gc.freeze()  # what was imported stays
        for seed in seeds:
            result = explorer.run(schedule_of(seed, kinds))
            report.num_run += 1
            report.simulated_s += result.simulated_s
            report.fired += result.fired
            report.waits += result.waits
            report.codes += result.codes
            if result.violations:
                report.failed[seed] = result.violations
            if report.num_run % COLLECT_EVERY == 0:
                gc.collect()
    gc.unfreeze()
    gc.enable()
    return report


def replay_line(seed: int) -> str:
    return f"python -m tests.chaos.explorer --replay {seed}"


def summary(report: ExplorerReport) -> str:
    rate = report.num_run / report.seconds * 60
    lines = [
        f"{report.num_run} schedules in {report.seconds:.1f} s ({rate:.0f} a minute), "
        f"{report.simulated_s:.0f} simulated seconds, {len(report.failed)} failed",
        "requests: " + ", ".join(f"{count} {code}" for code, count in report.codes.most_common()),
        "faults fired: " + ", ".join(f"{count} {kind}" for kind, count in report.fired.most_common()),
        "waits: " + ", ".join(f"{count} for {kind}" for kind, count in report.waits.most_common()),
    ]
    if never := sorted({*KINDS, *WAITS} - {*report.fired, *report.waits}):
        lines.append(f"never: {', '.join(never)}")
    for seed, violations in sorted(report.failed.items()):
        lines += [replay_line(seed), *(f"    {violation}" for violation in violations[:5])]
    return "\n".join(lines)
