"""Measured rates find a known hardware, follow it when it changes, and reach the registry."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from tandem.engine import Engine, EngineConfig, Request, SamplingParams, StepTime
from tandem.registry import Distance
from tandem.worker import EngineThread
from tandem.worker.engine.rates import Line, Rates

HARDWARE = StepTime(prefill_tokens_per_s=5000, decode_step_s=0.02, decode_sequence_s=0.001)


def run(rates: Rates, hardware: StepTime, dice: random.Random, steps: int, mixed: bool) -> None:
    """Steps of prompts, of 8 decodes, and of both, 5 % off the truth either way."""
    for i in range(steps):
        read = dice.randint(2, 512) if i % 2 else 0
        written = 0 if read and not mixed else 8
        seconds = hardware.seconds([read, *[1] * written]) * dice.uniform(0.95, 1.05)
        rates.step(read, written, seconds)


@pytest.mark.parametrize("mixed", [False, True])
def test_a_known_hardware_is_found(mixed: bool) -> None:
    rates = Rates()
    run(rates, HARDWARE, random.Random(1), 400, mixed)
    assert rates.prefill_tokens_per_s == pytest.approx(5000, rel=0.05)
    assert rates.step_s == pytest.approx(0.028, rel=0.05)


def test_a_slower_hardware_is_found_within_a_few_busy_seconds() -> None:
    rates, dice = Rates(), random.Random(2)
    run(rates, HARDWARE, dice, 400, mixed=True)
    slower = StepTime(prefill_tokens_per_s=1000, decode_step_s=0.1, decode_sequence_s=0)
    run(rates, slower, dice, 200, mixed=True)
    assert rates.prefill_tokens_per_s == pytest.approx(1000, rel=0.1)
    assert rates.step_s == pytest.approx(0.1, rel=0.1)


def test_the_longest_step_of_late_is_not_one_pause_and_is_not_kept_for_ever() -> None:
    rates = Rates()
    rates.step(0, 8, 0.01)
    rates.step(512, 0, 0.03)
    rates.step(0, 8, 0.01)
    assert rates.longest_step_s == pytest.approx(0.03, rel=0.01)
    rates.step(0, 8, 20.0)
    assert rates.longest_step_s == pytest.approx(0.12, rel=0.01)
    for _ in range(1000):
        rates.step(0, 8, 0.01)
    assert rates.longest_step_s == pytest.approx(0.01, rel=0.3)


def test_a_few_steps_say_nothing() -> None:
    rates = Rates()
    for _ in range(31):
        rates.step(0, 1, 0.5)
    assert rates.step_s == 0.0
    rates.step(0, 1, 0.5)
    assert rates.step_s == pytest.approx(0.5)


def test_nothing_seen_is_zero_and_what_was_seen_stays_while_idle() -> None:
    rates = Rates()
    assert (rates.prefill_tokens_per_s, rates.transfer_tokens_per_s(Distance.NEAR), rates.step_s) == (0, 0, 0)
    rates.distance_to = lambda peer: Distance.ZONE
    for _ in range(8):
        rates.moved("d0", 1000, 0.25)
    assert rates.transfer_tokens_per_s(Distance.ZONE) == pytest.approx(4000)
    assert rates.transfer_tokens_per_s(Distance.NEAR) == rates.transfer_tokens_per_s(Distance.FAR) == 0


@pytest.mark.parametrize("longest", [40, 2000])
def test_what_every_step_costs_is_no_reason_to_seem_slow(longest: int) -> None:
    """A worker that gets short prompts and one that gets all kinds say the same of equal hardware."""
    line, dice = Line(), random.Random(3)
    for _ in range(300):
        tokens = dice.randint(10, longest)
        line.add(tokens, (0.003 + tokens / 8000) * dice.uniform(0.95, 1.05))
    assert line.per_second == pytest.approx(8000, rel=0.15)


def test_a_few_observations_say_nothing_and_some_agree() -> None:
    """The worker that seemed fastest would get everything: so the first rates said must be near the truth."""
    rates = []
    for seed in range(200):
        line, dice = Line(), random.Random(seed)
        for _ in range(8):
            assert line.per_second == 0
            tokens = dice.randint(64, 800)
            line.add(tokens, 0.002 + tokens / 8000 + dice.uniform(0, 0.01))
        rates.append(line.per_second)
    assert 0.75 * 8000 < min(rates) < max(rates) < 1.33 * 8000


def test_equal_amounts_and_nonsense_give_the_rate_on_the_whole() -> None:
    equal, falling = Line(), Line()
    for _ in range(10):
        equal.add(100, 0.1)
    assert equal.per_second == pytest.approx(1000)
    for tokens, seconds in 3 * ((10, 0.5), (100, 0.1), (50, 0.3)):
        falling.add(tokens, seconds)
    whole = 160 / 0.9
    assert 0.8 * whole <= falling.per_second <= 9 * whole


def test_a_step_that_its_decodes_explain_says_nothing_of_prompts() -> None:
    rates = Rates()
    rates.step(0, 8, 0.1)
    for _ in range(20):
        rates.step(64, 8, 0.09)
    assert rates.prefill_tokens_per_s == 0


def test_the_rest_of_a_cached_prompt_says_nothing_of_a_rate() -> None:
    """Before anything else was read, and afterwards."""
    rates = Rates()
    rates.step(3, 0, 0.07)
    assert rates.prefill_tokens_per_s == 0
    for _ in range(8):
        rates.step(400, 0, 0.1)
    for _ in range(50):
        rates.step(1, 0, 0.008)
    assert rates.prefill_tokens_per_s == pytest.approx(4000)


async def test_the_engines_thread_measures_its_steps(demo_model: Path) -> None:
    hardware = StepTime(prefill_tokens_per_s=2000, decode_step_s=0.01, decode_sequence_s=0)
    engine = Engine(EngineConfig(demo_model, "demo", num_blocks=64, max_num_batched_tokens=32, null=hardware))
    thread = EngineThread(engine)
    thread.start(lambda outputs: None, lambda error: None)
    try:
        await thread.call(lambda engine: engine.add(Request("r", list(range(256)), SamplingParams(max_tokens=40))))
        async with asyncio.timeout(60):
            while thread.stats.num_written_tokens < 39:
                await asyncio.sleep(0.01)
    finally:
        thread.close()
    assert thread.stats.num_prefilled_tokens == 256
    assert 0 < thread.rates.prefill_tokens_per_s <= 2000  # sleeping never takes less than it should
    assert thread.rates.step_s >= 0.01
