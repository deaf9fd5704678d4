"""Requests that can never be served are refused at the door, naming the field, and leave nothing behind."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from tandem.engine import Engine, EngineConfig, KVLayout, Request, SamplingParams
from tests.engine.tiny import assert_idle, greedy, make_engine


@pytest.fixture(scope="module")
def engine(llama: Path) -> Engine:
    return make_engine(llama, num_blocks=16)


@pytest.mark.parametrize(
    ("token_ids", "max_tokens", "message"),
    [
        ([], 1, "token_ids: 0 tokens are not between 1 and max_model_len - 1 = 127"),
        ([2] * 128, 1, "token_ids: 128 tokens are not between"),
        ([2, 96, 3], 1, "token_ids: 96 is outside the vocabulary of 96"),
        ([2, -1], 1, "token_ids: -1 is outside the vocabulary"),
        ([2] * 60, 5, "token_ids: with max_tokens they need 17 KV blocks, there are 16"),
    ],
)
def test_prompts_that_never_fit(engine: Engine, token_ids: list[int], max_tokens: int, message: str) -> None:
    for enter in (engine.add, engine.reserve):
        with pytest.raises(ValueError, match=message):
            enter(Request("r", token_ids, greedy(max_tokens)))
    assert_idle(engine)


def test_prompts_that_just_fit(engine: Engine) -> None:
    engine.add(Request("whole", [2] * 60, greedy(4)))
    engine.add(Request("prefill", [2] * 64, greedy(99)), prefill_only=True)
    assert engine.reserve(Request("reserved", [2] * 60, greedy(4))) == 0
    for name in ("whole", "prefill", "reserved"):
        engine.abort(name)
    assert_idle(engine)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("min_tokens", -1),
        ("min_tokens", 6),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("repetition_penalty", 0.0),
        ("presence_penalty", float("inf")),
        ("frequency_penalty", float("nan")),
        ("logit_bias", {96: 1.0}),
        ("logit_bias", {1: float("nan")}),
        ("logprobs", -1),
        ("logprobs", 97),
    ],
)
def test_sampling_fields_out_of_range(engine: Engine, field: str, value: Any) -> None:
    sampling = dataclasses.replace(SamplingParams(max_tokens=5), **{field: value})
    with pytest.raises(ValueError, match=f"^{field} "):
        engine.add(Request("r", [2], sampling))
    assert_idle(engine)


def test_a_request_id_is_used_once_at_a_time(engine: Engine) -> None:
    engine.add(Request("r", [2], greedy(1)))
    for enter in (engine.add, engine.reserve):
        with pytest.raises(ValueError, match="request_id: 'r' is in the engine already"):
            enter(Request("r", [2], greedy(1)))
    assert engine.abort("r")
    assert_idle(engine)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_size": 0}, "block_size: 0"),
        ({"max_num_batched_tokens": -1}, "max_num_batched_tokens: -1"),
        ({"max_num_seqs": 0}, "max_num_seqs: 0"),
        ({"num_blocks": 0}, "num_blocks: 0"),
        ({"num_blocks": None, "kv_budget_bytes": None}, "kv_memory: a share is of a GPU's memory"),
        ({"num_blocks": None, "kv_budget_bytes": 10}, "kv_budget_bytes: 10 bytes do not hold one block"),
        ({"num_blocks": 10**9}, "model_path: does not fit"),
        ({"max_model_len": 4096}, "max_model_len: 4096 is more than the model's 128"),
        ({"dtype": "int8"}, "dtype: 'int8' is not one of"),
    ],
)
def test_configs_that_cannot_work(llama: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_engine(llama, **changes)


def test_a_folder_that_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"model_path: .*config.json does not exist"):
        Engine(EngineConfig(model_path=tmp_path, model_name="none"))


def test_the_budget_decides_how_many_blocks(llama: Path) -> None:
    engine = make_engine(llama, num_blocks=None, kv_budget_bytes=100_000)
    layout = engine.layout
    assert layout.block_bytes == 2 * 2 * 4 * 8 * 4
    assert engine.stats().num_blocks == 100_000 // (layout.block_bytes * 3)
    shape = (engine.stats().num_blocks, 2, 2, 4, 8)
    assert [tuple(kv.shape) for kv in engine.kv_cache] == [shape] * 3
    assert all(kv.is_contiguous() for kv in engine.kv_cache)


def test_layouts_differ_in_every_field() -> None:
    layout = KVLayout("m", "r", "float32", 2, 2, 8, 16)
    changes: list[dict[str, Any]] = [
        {"model": "n"}, {"revision": "s"}, {"dtype": "bfloat16"}, {"num_layers": 3}, {"num_kv_heads": 4},
        {"head_dim": 4}, {"block_size": 8}, {"tp": 2},
    ]  # fmt: skip
    hashes = {layout.hash, *(dataclasses.replace(layout, **change).hash for change in changes)}
    assert len(hashes) == 1 + len(changes)
    assert layout.hash == KVLayout("m", "r", "float32", 2, 2, 8, 16).hash
