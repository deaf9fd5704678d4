"""Many seeded schedules of faults over the whole cluster's real code: no promise of the failure contract is broken."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.explorer.many import explore, summary
from tests.chaos.explorer.run import Explorer
from tests.chaos.explorer.schedule import KINDS, schedule_of
from tests.chaos.explorer.shrink import parse, shrink
from tests.chaos.explorer.timeline import draw
from tests.chaos.explorer.waits import RARE, WAITS
from tests.chaos.test_planted import PLANTED
from tests.simulation.redis import Store

# As many as fit into this time, but so many at least and at most; `make chaos` runs as many as wanted.
SECONDS, LEAST, MOST, JOBS = 30.0, 150, 2000, 2


@pytest.mark.timeout(600)
def test_no_schedule_breaks_the_contract(demo_model: Path) -> None:
    report = explore(demo_model, range(MOST), jobs=JOBS, within_s=SECONDS, at_least=LEAST)
    print(summary(report))
    assert report.failed == {}, summary(report)
    assert report.num_run >= LEAST
    assert {*KINDS, "abort", "deadline", "slow reader"} <= set(report.fired)
    assert WAITS.keys() - RARE <= set(report.waits)


@pytest.mark.parametrize("seed", range(3))
def test_a_seed_is_a_run(store: Store, demo_model: Path, seed: int) -> None:
    explorer = Explorer(store, demo_model)
    first, again = (explorer.run(schedule_of(seed)) for _ in range(2))
    differences = [pair for pair in zip(first.events, again.events, strict=True) if pair[0] != pair[1]]
    assert differences == []


def test_a_failing_schedule_is_shrunk_and_drawn(
    store: Store, demo_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    explorer = Explorer(store, demo_model)
    bug = PLANTED["commit_without_all_frames"]
    bug.plant(monkeypatch)
    # A part of a schedule meets a fault that is rare only with much luck.
    often = (s for s in (schedule_of(seed, bug.kinds) for seed in range(200)) if min(f.chance for f in s.faults) > 0.1)
    schedule = next(schedule for schedule in often if explorer.run(schedule).violations)
    result, kept = shrink(schedule, explorer.run)
    assert len(result.schedule.requests) == 1
    assert {fault.kind for fault in result.schedule.faults} <= {"kv-drop", "kv-corrupt", "kv-reorder"}
    assert explorer.run(schedule.only(*parse(kept))).violations == result.violations
    drawn = draw(result.events)
    assert " reservations " in drawn
    assert " reserved " in drawn
    assert "KV COMMIT" in drawn
    assert "*** kv-" in drawn
