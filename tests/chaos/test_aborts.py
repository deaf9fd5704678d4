"""Hung up behind any message of its life, a request leaves nothing behind (`tests.chaos.explorer.aborts` has more)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.explorer.aborts import ABORTS_A_CLUSTER, Aborts
from tests.chaos.test_planted import PLANTED
from tests.simulation.redis import RedisStore


def test_nothing_is_held_within_two_seconds(store: RedisStore, demo_model: Path) -> None:
    aborts = Aborts(store, demo_model)
    aborts.run(ABORTS_A_CLUSTER)
    assert aborts.violations == []
    assert aborts.counts["aborted"] > ABORTS_A_CLUSTER / 2


def test_what_is_held_is_found(store: RedisStore, demo_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    PLANTED["no_abort_on_disconnect"].plant(monkeypatch)
    monkeypatch.setattr("tests.chaos.explorer.aborts.ABORTS_A_CLUSTER", 4)
    aborts = Aborts(store, demo_model)
    aborts.run(4)
    assert aborts.violations
