"""Prompts beside answers that have a target for the time between their tokens; on virtual time, null engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tandem.engine import Engine, EngineConfig, Request, SampledToken, StepTime
from tandem.engine.scheduling import Pace
from tests.engine.tiny import SIZES, greedy, prompt_of

# A decode step takes 20 ms, a prompt token 1 ms.
TIME = StepTime(prefill_tokens_per_s=1000, decode_step_s=0.020, decode_sequence_s=0.0)
PROMPT = 400


class HandClock:
    now = 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class PaceTrial:
    def __init__(self, folder: Path, null: StepTime = TIME, **config: int) -> None:
        self.clock = HandClock()
        made = EngineConfig(folder, "m", null=null, num_blocks=400, block_size=4, max_model_len=1024, **config)
        self.engine = Engine(made, sleep=self.clock.sleep, now=lambda: self.clock.now)

    def add(self, name: str, length: int, answer: int, target_s: float = 0.0) -> None:
        request = Request(name, prompt_of(length, len(name)), greedy(answer), itl_target_s=target_s)
        self.engine.add(request)

    def gaps(self, name: str) -> list[float]:
        """Between the tokens of an answer, until the prompt beside it is prefilled."""
        found, last = [], self.clock.now
        while self.engine.stats().queued_tokens:
            for output in self.engine.step():
                if output.request_id == name:
                    found.append(self.clock.now - last)
                    last = self.clock.now
        return found

    def warm_up(self) -> None:
        """Steps of both kinds: how long they take is known."""
        self.add("warm-up", 64, 20)
        while self.engine.has_work():
            self.engine.step()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("config")
    (made / "config.json").write_text(
        json.dumps({"model_type": "llama", **SIZES, "max_position_embeddings": 1024}), encoding="utf-8"
    )
    return made


def beside(trial: PaceTrial, target_s: float, others_s: float = 0.0) -> list[float]:
    """The gaps of an answer with this target while a prompt is prefilled beside it."""
    trial.add("answer", 8, 1000 - 8, target_s)
    trial.add("another", 8, 1000 - 8, others_s)
    trial.engine.step()
    trial.add("prompt", PROMPT, 1)
    return trial.gaps("answer")


@pytest.mark.parametrize("target_s", [0.050, 0.100, 0.300])
def test_chunks_keep_the_target_and_use_what_it_leaves(folder: Path, target_s: float) -> None:
    trial = PaceTrial(folder)
    trial.warm_up()
    gaps = beside(trial, target_s)
    assert max(gaps) <= target_s
    fits = (target_s - 0.020) * 1000
    assert len(gaps) <= PROMPT / fits * 1.4 + 3, "no more steps than the target makes necessary"


def test_the_tightest_target_of_a_step_counts(folder: Path) -> None:
    trial = PaceTrial(folder)
    trial.warm_up()
    assert max(beside(trial, 0.300, others_s=0.050)) <= 0.050


def test_one_that_joins_waits_for_the_step_under_way_and_has_its_token_within_the_target(folder: Path) -> None:
    trial = PaceTrial(folder)
    trial.warm_up()
    trial.add("answer", 8, 500, 0.100)
    trial.engine.step()
    trial.add("prompt", PROMPT, 1)
    for name in ("first", "second", "third"):
        request = Request(name, prompt_of(16, len(name)), greedy(500), itl_target_s=0.100)
        assert trial.engine.reserve(request) is not None
        handed_off = trial.clock.now
        trial.engine.step()
        trial.engine.join(name, SampledToken(1))
        written = {output.request_id for output in trial.engine.step()}
        assert name in written
        assert trial.clock.now - handed_off <= 0.100
    assert trial.engine.stats().queued_tokens > 0, "there was something to read all the time"


def test_where_decodes_alone_take_longer_prompts_get_as_long_as_they_have_waited(folder: Path) -> None:
    trial = PaceTrial(folder)
    trial.warm_up()
    gaps = beside(trial, 0.010)
    assert gaps[0] <= 2 * 0.020, "as long as decodes take"
    assert all(gap <= 0.020 + sum(gaps[:step]) + 1e-9 for step, gap in enumerate(gaps) if step)
    assert max(gaps) <= 11 * 0.020
    assert sum(gaps) <= 1.4 * PROMPT / 1000


def test_a_target_out_of_reach_makes_no_pause_longer_than_one_that_is_kept_beside_it(folder: Path) -> None:
    trial = PaceTrial(folder)
    trial.warm_up()
    gaps = beside(trial, 0.010, others_s=0.050)
    assert max(gaps) <= 0.050
    assert len(gaps) <= PROMPT / 25 * 1.4 + 3


def test_where_one_joins_at_each_step_prompts_come_on_all_the_same(folder: Path) -> None:
    """Two steps of 60 ms are more than 100 ms: one alone keeps the target."""
    slow = StepTime(prefill_tokens_per_s=8000, decode_step_s=0.060, decode_sequence_s=0.0)
    trial = PaceTrial(folder, null=slow)
    trial.warm_up()
    trial.add("answer", 8, 500, 0.100)
    trial.engine.step()
    trial.add("prompt", PROMPT, 1)
    steps = 0
    while trial.engine.stats().queued_tokens:
        request = Request(f"joins{steps}", prompt_of(16, steps), greedy(500), itl_target_s=0.100)
        assert trial.engine.reserve(request) is not None
        trial.engine.join(request.request_id, SampledToken(1))
        before, steps = trial.clock.now, steps + 1
        trial.engine.step()
        assert trial.clock.now - before <= 0.100
    assert steps <= PROMPT / (0.9 * 0.100 - 0.060) / 8000 * 1.4 + 2


def test_without_a_target_and_before_anything_was_measured_the_setting_counts(folder: Path) -> None:
    measured = PaceTrial(folder, max_prefill_beside_decode=100)
    measured.warm_up()
    assert max(beside(measured, 0.0)) == pytest.approx(0.120)
    assert max(beside(PaceTrial(folder, max_prefill_beside_decode=30), 0.300)) <= 0.050 + 1e-9, (
        "the setting is the most"
    )


def test_a_step_that_computes_nothing_makes_no_decode_seem_quick() -> None:
    """Such steps come while all that wait do so for blocks."""
    pace = Pace(512, None)
    pace.passed(0, 1, 0.02)
    pace.passed(64, 0, 0.064)

    def chunk() -> int:
        return pace.chunk({0.1}, joins=False, joined=False, waited_s=0.0)

    before = chunk()
    for _ in range(64):
        pace.passed(0, 0, 0.0001)
    assert chunk() == before
