"""Silence, judged by who was awake himself and by what both say of their starvation."""

from __future__ import annotations

import asyncio
from math import inf, nan
from pathlib import Path

import pytest

from tandem.liveness.silence import INTERVAL_S, LIMIT_S, LOOK_S, MOST_S, Liveness
from tandem.liveness.starvation import TICK_S, CpuPressure, Starvation, no_pressure
from tests.simulation.world import World


def silence(liveness: Liveness, since: float = 0.0, step: float = 0.1) -> float:
    """How long it takes until the peer is lost, looking at it every `step`."""
    now = since
    while not liveness.lost(now):
        now += step
    return now - since


def test_silence_on_a_quiet_machine_is_death_after_the_limit() -> None:
    assert silence(Liveness(0.0)) == pytest.approx(LIMIT_S, abs=0.11)


def test_its_own_starvation_stretches_it() -> None:
    assert silence(Liveness(0.0, lambda: 2.0)) == pytest.approx(3 * LIMIT_S, abs=0.11)


@pytest.mark.parametrize("starvation", [1.0, 4.0, 8.0, 20.0])
def test_a_starved_peer_has_time_for_its_next_ping(starvation: float) -> None:
    liveness = Liveness(0.0)
    liveness.heard(starvation, 0.0)
    assert silence(liveness) > max(1.5 * INTERVAL_S * (1 + starvation), 1.5 * LIMIT_S)


def test_starvation_of_long_ago_excuses_no_silence() -> None:
    liveness = Liveness(0.0)
    liveness.heard(MOST_S, 0.0)
    assert silence(liveness) < 11.0


def test_a_starved_peer_is_doubtful_before_it_is_lost() -> None:
    liveness = Liveness(0.0)
    liveness.heard(4.0, 0.0)
    looks = [(liveness.doubtful(tick * 0.1), liveness.lost(tick * 0.1)) for tick in range(100)]
    assert looks.index((True, False)) == pytest.approx(LIMIT_S / 0.1, abs=1)
    assert looks[-1] == (True, True)


@pytest.mark.parametrize("starvation", [1000.0, inf, nan, -5.0])
def test_whatever_a_peer_says_it_is_lost_in_the_end(starvation: float) -> None:
    liveness = Liveness(0.0)
    liveness.heard(starvation, 0.0)
    assert silence(liveness) <= MOST_S + 0.11


def test_who_was_not_run_itself_blames_nobody() -> None:
    liveness = Liveness(0.0)
    assert not liveness.lost(100.0)  # it looks for the first time: only so much of that was silence
    assert silence(liveness, since=100.0) == pytest.approx(LIMIT_S - LOOK_S, abs=0.11)
    liveness.heard_at = 200.0
    assert not liveness.lost(200.1)


def test_who_cannot_be_replaced_is_waited_for() -> None:
    liveness = Liveness(0.0)
    liveness.sole = True
    assert silence(liveness) == pytest.approx(MOST_S, abs=0.11)


def test_pings_come_whatever_else_is_sent() -> None:
    liveness, pings = Liveness(0.0), 0
    for tick in range(31):
        pings += liveness.ping_due(tick * 0.1)
        assert liveness.due_s(tick * 0.1) <= INTERVAL_S + 1e-9
    assert pings == pytest.approx(3.0 / INTERVAL_S, abs=1)


def test_late_timers_are_starvation_and_are_forgotten_by_and_by() -> None:
    with World(1) as world:
        process = world.process("p")
        starvation = Starvation(no_pressure)
        process.spawn(starvation.run())

        async def seen() -> list[float]:
            await asyncio.sleep(1.0)
            quiet = starvation.now()
            world.after(0.0, process.pause)
            world.after(1.0, process.resume)
            await asyncio.sleep(0.01)
            await asyncio.sleep(2 * TICK_S)
            struck = starvation.now()
            await asyncio.sleep(30.0)
            return [quiet, struck, starvation.now()]

        quiet, struck, after = world.run(process, seen())
    assert quiet < 0.01
    assert 1.0 < struck < 2.5
    assert after < 0.1


def test_pressure_is_what_the_kernel_says(tmp_path: Path) -> None:
    schedstat, pressure = tmp_path / "schedstat", tmp_path / "cpu"
    schedstat.write_text("5 0 1\n", encoding="utf-8")
    pressure.write_text("some avg10=0.00 avg60=1.00 avg300=1.00 total=1\n", encoding="utf-8")
    read = CpuPressure(schedstat, pressure)
    assert read(1.0) == 0.0
    schedstat.write_text("5 800000000 1\n", encoding="utf-8")
    assert read(1.0) == pytest.approx(4.0)
    pressure.write_text("some avg10=50.00 avg60=1.00 avg300=1.00 total=1\n", encoding="utf-8")
    assert read(1.0) == pytest.approx(0.5)


def test_a_kernel_without_these_files_has_no_pressure(tmp_path: Path) -> None:
    assert CpuPressure(tmp_path / "none", tmp_path / "neither")(1.0) == 0.0
