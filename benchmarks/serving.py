"""Measures Tandem beside its peers on the same cores and weights, in one run.

1. the machine's floors
2. for each model, `rounds` times, for each peer: start it, run its workloads, stop it; one at a time, but in turns, so
   that slow minutes of the machine meet all of them
   --noise N: each workload again beside N other processes that do nothing but compute
3. after each peer, write all that is known as JSON; at the end, print a table of each workload: medians, and ratios
   to the baseline (the best of those named, metric by metric)
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import signal
import zlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console
from rich.table import Table

from benchmarks.floors import Floors, measured
from benchmarks.load import LoadClient, PeerError, Workload, all_workloads, beside
from benchmarks.models import MODELS, OUT, Shape, made
from benchmarks.peers import MeasuredPeer, PeerUnavailable, by_url, known
from benchmarks.results import Figure, Metric
from tandem.machine.native import cpu_instructions

RESULTS = OUT / "serving.json"


@dataclass(slots=True)
class Report:
    """All figures of one run: `figures[workload][peer][metric]`, and why a peer has none."""

    floors: Floors
    workloads: list[Workload]
    peers: list[MeasuredPeer]
    baseline: tuple[str, ...]
    figures: dict[str, dict[str, dict[str, Figure]]] = field(default_factory=lambda: defaultdict(dict))
    missing: list[str] = field(default_factory=list)

    def add(self, workload: Workload, peer: MeasuredPeer, values: dict[str, float]) -> None:
        """One more round."""
        before = self.figures[workload.name].get(peer.name)
        self.figures[workload.name][peer.name] = {
            name: Figure((*(before[name].rounds if before else ()), value)) for name, value in values.items()
        }

    def ratio(self, workload: Workload, peer: MeasuredPeer, metric: Metric, value: float) -> float | None:
        """`value` against the baseline, or beside neighbours, against the peer's own without; None where none ran."""
        ran = self.figures[workload.quiet or workload.name]
        baseline = (peer.name,) if workload.quiet else self.baseline
        values = [ran[name][metric.name].median for name in baseline if name in ran]
        return metric.ratio(value, metric.best(values)) if values else None

    def as_json(self) -> dict[str, Any]:
        return {
            "machine": {
                "processor": platform.processor() or platform.machine(),
                "multiplies with": sorted(cpu_instructions() & {"avx512_bf16", "amx_bf16"}),
                "python": platform.python_version(),
            },
            "floors": asdict(self.floors),
            "baseline": self.baseline,
            "peers": {peer.name: peer.title for peer in self.peers},
            "missing": self.missing,
            "workloads": [self._workload_json(workload) for workload in self.workloads],
        }

    def _workload_json(self, workload: Workload) -> dict[str, Any]:
        return {
            "name": workload.name,
            "title": workload.title,
            "model": workload.shape.name,
            "metrics": [asdict(metric) for metric in workload.metrics],
            "results": {
                peer: {name: {"median": one.median, "rounds": one.rounds} for name, one in figures.items()}
                for peer, figures in self.figures[workload.name].items()
            },
        }


def main() -> None:
    console, options = Console(), _options()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that a running peer is stopped on the way out
    report = Report(measured(), options.only, options.peers, tuple(options.baseline.split(",")))
    console.print(f"floors: {report.floors}")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    for shape in dict.fromkeys(workload.shape for workload in report.workloads):
        _measure_model(report, shape, options, console)
    for workload in report.workloads:
        console.print(table(report, workload))
    console.print(f"floors: {report.floors}")
    for line in report.missing:
        console.print(line, markup=False)
    console.print(f"written to {options.out}; python -m benchmarks.chart draws it", markup=False)


def _measure_model(report: Report, shape: Shape, options: argparse.Namespace, console: Console) -> None:
    """Runs the model's workloads on all peers; notes why one cannot, and goes on without it."""
    workloads = [workload for workload in report.workloads if workload.shape == shape]
    peers = list(report.peers)
    for number in range(options.rounds):
        for peer in tuple(peers):
            mine = [w for w in workloads if peer.name in w.peers or options.named or peer.url]
            if not mine:
                continue
            console.print(f"{peer.title}, {shape.name}, round {number + 1}: starting")
            try:
                with peer.running(made(shape)) as client:
                    for workload in mine:
                        console.print(f"  {workload.title}")
                        with beside(workload.noise):
                            report.add(workload, peer, measure(client, workload, number, warm=options.rounds > 1))
            except (PeerUnavailable, PeerError, FileNotFoundError, TimeoutError, ExceptionGroup) as error:
                peers.remove(peer)
                report.missing.append(f"{peer.title}, {shape.name}, round {number + 1}: {_cause(error)}")
                console.print(f"  {report.missing[-1]}", markup=False)
            options.out.write_text(json.dumps(report.as_json(), indent=1), encoding="utf-8")


def measure(client: LoadClient, workload: Workload, number: int, warm: bool) -> dict[str, float]:
    """One round's values; the same prompts for every peer, others each round.

    `warm`: behind a round that nobody counts. One round alone is a quick look and goes without.
    """
    seeds = ([f"{number} warm"] if warm else []) + [str(number)]
    values = [
        uvloop.run(workload.run(client, random.Random(zlib.crc32(f"{workload.name} {seed}".encode()))))
        for seed in seeds
    ]
    return values[-1]


def table(report: Report, workload: Workload) -> Table:
    """A row a peer: the median, and in brackets how many times as good as the baseline."""
    baseline = "itself, alone" if workload.quiet else " or ".join(report.baseline)
    found = Table(title=workload.title, title_justify="left", caption=f"x: against {baseline}")
    found.add_column("")
    for metric in workload.metrics:
        found.add_column(f"{metric.name}, {metric.unit}", justify="right")
    for peer in report.peers:
        if figures := report.figures[workload.name].get(peer.name):
            found.add_row(
                peer.title, *(_cell(report, workload, peer, m, figures[m.name].median) for m in workload.metrics)
            )
    return found


def _cell(report: Report, workload: Workload, peer: MeasuredPeer, metric: Metric, value: float) -> str:
    ratio = report.ratio(workload, peer, metric, value)
    return f"{value:,.{digits(value)}f}" + ("" if ratio is None else f"  ({ratio:.2f}x)")


def digits(value: float) -> int:
    return 0 if value >= 100 else 1 if value >= 10 else 2


def _cause(error: BaseException) -> str:
    """The first real cause within task groups, on one line."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return " ".join(f"{type(error).__name__}: {error}".split())


def _options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    workloads, peers = all_workloads(), known()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving", description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=[], help=f"workloads, of {','.join(workloads)} (default: all)", type=_names)
    parser.add_argument("--peers", default=[], help=f"of {','.join(peers)} (default: each workload's own)", type=_names)
    parser.add_argument(
        "--peer", action="append", default=[], type=by_url, metavar="NAME=URL",
        help="an OpenAI server that runs already and serves a folder of `python -m benchmarks.models` by its name",
    )  # fmt: skip
    parser.add_argument("--model", choices=MODELS, help="in place of the workloads' own")
    parser.add_argument("--rounds", type=int, default=3, help="of which the median is taken")
    parser.add_argument("--noise", type=int, default=0, help="processes that compute beside it, in a second turn")
    parser.add_argument("--baseline", default="vllm,vllm-256", help="what ratios are taken against: the best of these")
    parser.add_argument("--out", type=Path, default=RESULTS)
    found = parser.parse_args(arguments)
    if found.rounds < 1:
        parser.error("rounds: at least 1")
    found.only = [_known(parser, "only", workloads, name) for name in found.only or workloads]
    if found.model:
        found.only = [workload.of(MODELS[found.model]) for workload in found.only]
    found.only += [workload.beside(found.noise) for workload in found.only if found.noise]
    found.named = bool(found.peers)
    found.peers = [_known(parser, "peers", peers, name) for name in found.peers or peers] + found.peer
    return found


def _names(text: str) -> list[str]:
    return text.split(",")


def _known(parser: argparse.ArgumentParser, option: str, choices: dict[str, Any], name: str) -> Any:
    if name not in choices:
        parser.error(f"{option}: {name!r} is none of {', '.join(choices)}")
    return choices[name]


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
