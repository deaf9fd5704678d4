"""The null engine: the real engine's behaviour, KV that is verified by its readers, and stated times."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tandem.engine import Engine, EngineConfig, FinishReason, Request, SampledToken, SamplingParams, StepTime
from tandem.engine.null_runner import NullRunner
from tandem.engine.scheduling.scheduler import Scheduled
from tandem.engine.scheduling.sequence import new_sequence
from tests.engine.test_handoff import BLOCK, disaggregated
from tests.engine.tiny import SIZES, VOCAB, assert_idle, generate, greedy, make_engine, prompt_of, run, tokens

FAST = StepTime(speedup=1e6)
SEEDED = SamplingParams(max_tokens=10, temperature=1.0, seed=11)


@pytest.fixture(scope="module")
def config_only(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder without weights."""
    folder = tmp_path_factory.mktemp("config")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **SIZES}), encoding="utf-8")
    return folder


def null_engine(folder: Path, **config: Any) -> Engine:
    return make_engine(folder, **{"null": FAST, **config})


@pytest.mark.parametrize("sampling", [greedy(10), SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, 33])
def test_tokens_equal_one_engines(config_only: Path, length: int, sampling: SamplingParams) -> None:
    prefill, decode = null_engine(config_only, max_num_batched_tokens=10), null_engine(config_only)
    prompt = prompt_of(length)
    expected = generate(null_engine(config_only, enable_prefix_caching=False), prompt, sampling)
    assert len(expected) == 10
    for cached in (False, True):
        assert disaggregated(prefill, decode, prompt, sampling) == expected, cached
    assert_idle(prefill)
    assert_idle(decode)


def test_an_answer_depends_on_every_token_of_its_prompt_and_on_its_seed(config_only: Path) -> None:
    engine = null_engine(config_only)
    prompt = prompt_of(20)
    answers = {tuple(generate(engine, prompt, replace(SEEDED, seed=seed))) for seed in range(3)}
    for changed in range(20):
        other = [*prompt[:changed], (prompt[changed] + 1) % VOCAB, *prompt[changed + 1 :]]
        answers.add(tuple(generate(engine, other, SEEDED)))
    assert len(answers) == 23


def test_a_batch_gives_everyone_what_they_get_alone(config_only: Path) -> None:
    prompts = {f"r{i}": prompt_of(3 + 7 * i, seed=i) for i in range(5)}
    alone = {name: generate(null_engine(config_only), prompt, SEEDED) for name, prompt in prompts.items()}
    crowded = null_engine(config_only, num_blocks=20)  # some are preempted
    for name, prompt in prompts.items():
        crowded.add(Request(name, prompt, SEEDED))
    assert {name: tokens(outputs) for name, outputs in run(crowded).items()} == alone
    assert_idle(crowded)


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("position", [0, 5, 11])
def test_one_damaged_byte_ends_the_sequence_that_reads_it_alone(config_only: Path, layer: int, position: int) -> None:
    engine = null_engine(config_only)
    for name in ("hurt", "whole"):
        engine.add(Request(name, prompt_of(12, seed=len(name)), greedy(8)))
    engine.step()
    engine.step()
    block = engine._live["hurt"].block_table[position // BLOCK]
    engine.kv_cache[layer][block, 1, 0, position % BLOCK].neg_()
    outputs = run(engine)
    assert (
        outputs["hurt"][-1].error == f"KV is damaged: position {position} of layer {layer} is not what the tokens say"
    )
    assert outputs["hurt"][-1].finished
    assert outputs["whole"][-1].finish_reason is FinishReason.LENGTH
    assert_idle(engine)


def test_another_prompts_blocks_are_found_out(config_only: Path) -> None:
    """A decode worker that is told that a transfer is whole though nothing came."""
    engine = null_engine(config_only)
    assert engine.reserve(Request("r", prompt_of(9), greedy(4))) == 0
    first = generate(null_engine(config_only), prompt_of(9), greedy(1))
    engine.join("r", SampledToken(first[0]))
    (output,) = run(engine)["r"]
    assert output.error is not None
    assert not output.tokens


def test_stop_tokens_are_never_drawn(config_only: Path) -> None:
    allowed = {3, 50}
    stops = frozenset(range(VOCAB)) - allowed
    answer = generate(null_engine(config_only), prompt_of(5), replace(SEEDED, max_tokens=30, stop_token_ids=stops))
    assert set(answer) == allowed
    assert len(answer) == 30


def test_a_step_sleeps_as_long_as_the_model_says(config_only: Path) -> None:
    engine, slept = null_engine(config_only), list[float]()
    times = StepTime(prefill_tokens_per_s=100, decode_step_s=0.5, decode_sequence_s=0.25, speedup=2)
    runner = NullRunner(times, engine.kv_cache, VOCAB, slept.append)
    seqs = [new_sequence(Request(f"r{i}", [1] * n, greedy(4)), i, engine.layout) for i, n in enumerate((30, 1, 1))]
    for i, seq in enumerate(seqs):
        seq.block_table = list(range(8 * i, 8 * i + 8))
    runner.execute([Scheduled(seqs[0], 30, True)])
    assert sum(slept) == pytest.approx(30 / 100 / 2)
    assert len(slept) == engine.layout.num_layers  # layers leave one by one
    runner.execute([Scheduled(seqs[1], 1, True), Scheduled(seqs[2], 1, True)])
    assert sum(slept) == pytest.approx((30 / 100 + 0.5 + 2 * 0.25) / 2)
    runner.execute([])
    assert len(slept) == 2 * engine.layout.num_layers


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prefill_tokens_per_s", 0),
        ("decode_step_s", -1),
        ("decode_sequence_s", float("nan")),
        ("speedup", float("inf")),
    ],
)
def test_a_time_out_of_range_is_named(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=field):
        StepTime(**{field: value})


def test_a_null_engine_pairs_with_no_other(config_only: Path, llama: Path) -> None:
    null, real = null_engine(config_only), make_engine(llama)
    assert null.layout.hash != real.layout.hash
    with pytest.raises(ValueError, match="device"):
        Engine(EngineConfig(model_path=config_only, model_name="tiny", device="cuda", null=FAST))
