from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.chart import draw
from benchmarks.floors import Floors
from benchmarks.load import Job, LoadClient, Workload, all_workloads, beside, closed_loop
from benchmarks.models import LARGE, MODELS
from benchmarks.peers import PeerUnavailable, by_url, known, started
from benchmarks.results import Figure, Metric, throughput
from benchmarks.serving import Report, _options, measure, table
from tandem.local import free_ports
from tests.benchmarks.conftest import TINY

FLOORS = Floors(2, 20.0, 30.0, 200.0, 400.0)
SPEED = Metric("output", "tok/s")


async def two_streams(client: LoadClient, dice: random.Random) -> dict[str, float]:
    jobs = [Job([dice.randint(300, 500) for _ in range(20)], 8) for _ in range(2)]
    return {"output": throughput(await closed_loop(client, jobs, 2))}


def reported(**figures: Figure) -> Report:
    peers = [known()[name] for name in figures]
    workload = Workload("two", "Two streams", TINY, (SPEED,), two_streams)
    report = Report(FLOORS, [workload], peers, ("vllm", "vllm-256"))
    report.figures["two"] = {name: {"output": figure} for name, figure in figures.items()}
    return report


@pytest.mark.parametrize("warm", [True, False])
def test_a_round_is_measured_on_a_real_server_behind_one_that_does_not_count(server: LoadClient, warm: bool) -> None:
    seen: list[float] = []

    async def told(client: LoadClient, dice: random.Random) -> dict[str, float]:
        seen.append((await two_streams(client, dice))["output"])
        return {"output": seen[-1]}

    assert measure(server, Workload("two", "Two streams", TINY, (SPEED,), told), 0, warm) == {"output": seen[-1]}
    assert len(seen) == 1 + warm
    assert min(seen) > 0


def test_workloads_run_on_the_model_that_is_named() -> None:
    asked = ["--only", "single,phase"]
    assert [workload.shape for workload in _options(asked).only] == [LARGE, LARGE]
    for name, shape in MODELS.items():
        workloads = _options([*asked, "--model", name]).only
        assert [workload.shape for workload in workloads] == [shape, shape]
        assert all(shape.name in workload.title for workload in workloads)


def test_rounds_come_one_by_one_and_the_median_is_of_all() -> None:
    report = reported(tandem=Figure((30.0,)))
    for value in (10.0, 40.0):
        report.add(report.workloads[0], report.peers[0], {"output": value})
    assert report.figures["two"]["tandem"]["output"] == Figure((30.0, 10.0, 40.0))
    assert report.figures["two"]["tandem"]["output"].median == 30.0


def test_the_table_gives_ratios_to_the_best_baseline_that_ran() -> None:
    report = reported(tandem=Figure((30.0,)), vllm=Figure((20.0,)))
    report.figures["two"]["vllm-256"] = {"output": Figure((15.0,))}
    console = Console(width=100)
    with console.capture() as captured:
        console.print(table(report, report.workloads[0]))
    assert "(1.50x)" in captured.get()
    assert "(1.00x)" in captured.get()


def test_no_ratio_where_no_baseline_ran() -> None:
    report = reported(tandem=Figure((30.0,)))
    assert report.ratio(report.workloads[0], report.peers[0], SPEED, 30.0) is None


def test_beside_neighbours_a_peer_is_compared_with_itself() -> None:
    report = reported(tandem=Figure((30.0,)), vllm=Figure((20.0,)))
    noisy = report.workloads[0].beside(1)
    report.workloads.append(noisy)
    report.figures[noisy.name] = {"tandem": {"output": Figure((18.0,))}, "vllm": {"output": Figure((10.0,))}}
    console = Console(width=100)
    with console.capture() as captured:
        console.print(table(report, noisy))
    assert "(0.60x)" in captured.get()
    assert "(0.50x)" in captured.get()


def test_neighbours_are_gone_afterwards() -> None:
    with beside(2) as neighbours:
        assert [neighbour.poll() for neighbour in neighbours] == [None, None]
    assert None not in [neighbour.poll() for neighbour in neighbours]


def test_the_chart_draws_what_was_written(tmp_path: Path) -> None:
    report = reported(tandem=Figure((30.0,)), vllm=Figure((20.0,)))
    report.workloads = list(all_workloads().values())
    for workload in report.workloads:
        for peer in ("tandem", "vllm"):
            report.figures[workload.name][peer] = {m.name: Figure((1.0, 2.0, 4.0)) for m in workload.metrics}
    draw(json.loads(json.dumps(report.as_json())), tmp_path / "chart.png")
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")


def test_a_url_without_a_server_is_no_peer_and_says_so(tmp_path: Path) -> None:
    port = free_ports(1)[0]
    with (
        pytest.raises(PeerUnavailable, match="nothing answers"),
        by_url(f"x=http://127.0.0.1:{port}").running(tmp_path),
    ):
        pass


@pytest.mark.parametrize("text", ["http://127.0.0.1:1", "=http://127.0.0.1:1", "x=127.0.0.1:1"])
def test_a_peer_is_named_and_has_an_http_url(text: str) -> None:
    with pytest.raises(ValueError, match="name=http"):
        by_url(text)


def test_what_was_started_is_gone_afterwards(tmp_path: Path) -> None:
    with started([sys.executable, "-c", "import time; time.sleep(60)"], tmp_path / "log", {}) as process:
        assert process.poll() is None
    assert process.poll() is not None
