"""Many seeded schedules of faults over the whole cluster's real code: no promise of the failure contract is broken."""

from __future__ import annotations

import re
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from tandem.local import RedisServer
from tests.chaos.explorer.many import explore, summary
from tests.chaos.explorer.run import Explorer
from tests.chaos.explorer.schedule import KINDS, schedule_of
from tests.chaos.explorer.shrink import parse, shrink
from tests.chaos.explorer.timeline import draw
from tests.chaos.explorer.waits import RARE, WAITS
from tests.chaos.test_planted import PLANTED
from tests.simulation.redis import RedisStore

# `make test` runs the first, `make check` them all, `make chaos` as many as wanted.
NUM_SCHEDULES, NUM_AT_ONCE, JOBS = 2000, 20, 2
ELSEWHERE_S = 120.0


@pytest.mark.timeout(900)  # schedules are counted, not their seconds
def test_no_schedule_of_the_first_breaks_the_contract(demo_model: Path) -> None:
    report = explore(demo_model, range(NUM_AT_ONCE), jobs=JOBS)
    assert report.failed == {}, summary(report)
    assert report.num_run == NUM_AT_ONCE


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_no_schedule_breaks_the_contract(demo_model: Path) -> None:
    report = explore(demo_model, range(NUM_SCHEDULES), jobs=JOBS)
    print(summary(report))
    assert report.failed == {}, summary(report)
    assert report.num_run == NUM_SCHEDULES
    assert {*KINDS, "abort", "deadline", "slow reader", "model joins", "model leaves"} <= set(report.fired)
    assert WAITS.keys() - RARE <= set(report.waits)


@pytest.mark.long
def test_a_seed_is_a_run(store: RedisStore, demo_model: Path) -> None:
    """Also over another redis-server, in a process whose sets are in another order; but not what is logged."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        elsewhere = pool.submit(_runs_elsewhere, demo_model)
        here = _runs(store, demo_model)
        for ours, theirs in zip(here, elsewhere.result(timeout=ELSEWHERE_S), strict=True):
            assert [pair for pair in zip(ours, theirs, strict=True) if pair[0] != pair[1]] == []


def _runs_elsewhere(model: Path) -> list[list[str]]:
    with RedisServer.start() as server, RedisStore(server.port) as store:
        return _runs(store, model)


def _runs(store: RedisStore, model: Path) -> list[list[str]]:
    explorer = Explorer(store, model)
    return [[_text(event) for event in explorer.run(schedule_of(seed)).events if event[1] != "log"]
            for seed in (0, 11, 17)]  # fmt: skip


def _text(event: tuple[Any, ...]) -> str:
    return re.sub("0x[0-9a-f]+", "an address", repr(event))


@pytest.mark.long
def test_a_failing_schedule_is_shrunk_and_drawn(
    store: RedisStore, demo_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    explorer = Explorer(store, demo_model)
    bug = PLANTED["commit_without_all_frames"]
    bug.plant(monkeypatch)
    # A part of a schedule meets a fault that is rare only with much luck.
    often = (s for s in (schedule_of(seed, bug.kinds) for seed in range(200)) if min(f.chance for f in s.faults) > 0.1)
    schedule = next(schedule for schedule in often if explorer.run(schedule).violations)
    result, kept = shrink(schedule, explorer.run)
    assert len(result.schedule.requests) < len(schedule.requests)
    assert {fault.kind for fault in result.schedule.faults} <= {"kv-drop", "kv-corrupt", "kv-reorder"}
    assert explorer.run(schedule.only(*parse(kept))).violations == result.violations
    drawn = draw(result.events)
    assert " reservations " in drawn
    assert " reserved " in drawn
    assert "KV COMMIT" in drawn
    assert "*** kv-" in drawn
