"""Engines of one machine borrow each other's idle cores, and only idle ones."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem.engine import Request
from tandem.engine.cores import Cores
from tests.engine.tiny import generate, greedy, make_engine, prompt_of

TOTAL = max(3, len(os.sched_getaffinity(0)))


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Cores, Cores]]:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(TOTAL)))
    a, b = Cores(1, tmp_path), Cores(TOTAL - 1, tmp_path)
    yield a, b
    a.close()
    b.close()


def test_alone_an_engine_has_its_own() -> None:
    assert Cores(3).threads() == 3


def test_who_works_alone_has_all_cores(pair: tuple[Cores, Cores]) -> None:
    a, b = pair
    a.work()
    assert a.threads() == TOTAL
    b.work()
    assert (a.threads(), b.threads()) == (1, TOTAL - 1)
    a.rest()
    assert b.threads() == TOTAL
    b.rest()
    a.work()
    assert a.threads() == TOTAL


def test_the_cores_of_a_killed_engine_are_free(pair: tuple[Cores, Cores], tmp_path: Path) -> None:
    a, _ = pair
    code = "import sys, pathlib, time; from tandem.engine.cores import Cores; c = Cores(1, pathlib.Path(sys.argv[1]))"
    code += "; c.work(); print('works', flush=True); time.sleep(60)"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, encoding="utf-8"
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "works\n"
        assert a.threads() == TOTAL - 1
        other.kill()
        other.wait()
        assert a.threads() == TOTAL


def test_an_engine_works_from_its_first_step_to_its_last_sequence(
    llama: Path, pair: tuple[Cores, Cores], tmp_path: Path
) -> None:
    _, other = pair
    engine = make_engine(llama, num_threads=1, shared_cores=tmp_path)
    alone = generate(make_engine(llama, num_threads=1), prompt_of(20), greedy(4))
    assert other.threads() == TOTAL
    assert generate(engine, prompt_of(20), greedy(4)) == alone
    assert other.threads() == TOTAL
    engine.add(Request("a", prompt_of(20), greedy(4)))
    engine.step()
    assert other.threads() == TOTAL - 1
    engine.abort("a")
    assert other.threads() == TOTAL
