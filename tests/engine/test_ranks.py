"""Ranks as processes: their deaths are noticed, named and waited for, and none is left behind."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from tandem.engine import Engine, EngineConfig, RankDied, Request
from tandem.engine.parallel import RankMemory, RunningRank, as_processes
from tests.engine.rank_threads import ranked_engine
from tests.engine.tiny import generate, greedy, make_engine, prompt_of, run

PROMPT, SAMPLING = prompt_of(20), greedy(60, ignore_eos=True)


@pytest.fixture
def engine(llama: Path) -> Iterator[Engine]:
    engine = make_engine(llama, tensor_parallel=2)
    yield engine
    engine.ranks.close()


def children() -> list[psutil.Process]:
    found = psutil.Process().children(recursive=True)
    return [child for child in found if "tandem.engine.loading.rank" in child.cmdline()]


def test_processes_compute_what_one_does(engine: Engine, llama: Path) -> None:
    assert generate(engine, PROMPT, SAMPLING) == generate(make_engine(llama), PROMPT, SAMPLING)
    (child,) = children()
    engine.ranks.close()
    assert not psutil.pid_exists(child.pid)


@pytest.mark.parametrize(
    ("how", "message", "cause"),
    [
        (signal.SIGKILL, "rank 1 ended with status -9", "SIGKILL"),
        (signal.SIGSEGV, "rank 1 ended with status -11", "SIGSEGV"),
        (signal.SIGSTOP, "rank 1 stood still for 1.[5-9] s", ""),
    ],
)
def test_a_lost_rank_ends_the_step_that_waits_for_it(
    how: signal.Signals, message: str, cause: str, engine: Engine
) -> None:
    engine.add(Request("r", PROMPT, SAMPLING))
    for _ in range(4):
        engine.step()
    (child,) = children()
    os.kill(child.pid, how)
    with pytest.raises(RankDied, match=f"^{message}$") as died:
        run(engine)
    assert died.value.cause == cause
    with pytest.raises(RankDied, match=message):
        engine.ranks.check()
    child.wait(30)


def test_a_lost_rank_of_an_idle_engine_is_noticed(engine: Engine) -> None:
    engine.ranks.check()
    (child,) = children()
    child.kill()
    child.wait(30)
    with pytest.raises(RankDied):
        checked_for_ever(engine)


def checked_for_ever(engine: Engine) -> None:
    """Checks until the thread that waits for the rank has seen its end, too."""
    while True:
        engine.ranks.check()


def test_a_rank_that_cannot_load_is_named(llama: Path, tmp_path: Path) -> None:
    started: list[RunningRank] = []

    def start_without_weights(job: Any, memory: RankMemory) -> RunningRank:
        started.append(as_processes(replace(job, config=replace(job.config, model_path=tmp_path)), memory))
        return started[-1]

    config = EngineConfig(llama, "tiny", dtype="float32", num_blocks=64, tensor_parallel=2)
    with pytest.raises(ValueError, match=r"^tensor_parallel: rank 1 ended with status 1 while it loaded$"):
        Engine(config, start_rank=start_without_weights)
    assert started[0].status() == 1


def test_ranks_outlive_the_thread_that_built_the_engine(llama: Path) -> None:
    built: list[Engine] = []
    thread = threading.Thread(target=lambda: built.append(make_engine(llama, tensor_parallel=2)))
    thread.start()
    thread.join()
    assert generate(built[0], PROMPT, SAMPLING) == generate(ranked_engine(llama, 1), PROMPT, SAMPLING)
    built[0].ranks.close()


def test_the_leader_that_cannot_load_leaves_no_rank(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes((llama / "model.safetensors").read_bytes())
    (tmp_path / "config.json").write_bytes((llama / "config.json").read_bytes())

    def start_and_lose(job: Any, memory: RankMemory) -> RunningRank:
        rank = as_processes(job, memory)
        (tmp_path / "model.safetensors").unlink()
        return rank

    with pytest.raises(ValueError, match="does not exist"):
        Engine(
            EngineConfig(tmp_path, "tiny", num_blocks=64, revision="r", tensor_parallel=2), start_rank=start_and_lose
        )
    assert children() == []
