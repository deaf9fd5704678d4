"""The replay of Mooncake's trace: its scaling, the simulated bounds, and a small fleet end to end."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.fleet import (
    MODEL,
    NullFleet,
    SimulatedWorker,
    hit_rate,
    perfect_hit_rate,
    pooled_hit_rate,
    running,
    tokens_read,
)
from benchmarks.replay import figures
from benchmarks.traffic import BLOCK, TraceRequest, read_trace, replay


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    rows = [
        {"timestamp": 1000 * i, "input_length": 512 * 3 + 40, "output_length": 65, "hash_ids": [7, 8, 100 + i, 200 + i]}
        for i in range(8)
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    return path


def request(at: float, *blocks: int) -> TraceRequest:
    return TraceRequest(at, BLOCK * len(blocks), 1, blocks)


def test_scaling_keeps_which_prompts_begin_alike(trace: Path) -> None:
    requests = read_trace(10, trace)
    assert [one.at for one in requests] == pytest.approx([i / 10 for i in range(8)])
    assert {(one.prompt_tokens, one.max_tokens, len(one.prompt())) for one in requests} == {(50, 3, 50)}
    for a, b in pairwise(one.prompt() for one in requests):
        assert a[: 2 * BLOCK] == b[: 2 * BLOCK]
        assert a[2 * BLOCK : 3 * BLOCK] != b[2 * BLOCK : 3 * BLOCK]
    assert requests[0].full_blocks == (7, 8, 100)
    with pytest.raises(FileNotFoundError, match="save"):
        read_trace(10, trace.parent / "nowhere")


def test_an_engine_computes_the_last_token_whatever_is_cached() -> None:
    worker = SimulatedWorker(num_blocks=8, tokens_per_s=100)
    assert worker.read(request(0, 1, 2, 3), 0) == 0
    assert worker.read(request(0, 1, 2, 3), 1) == 2 * BLOCK
    assert worker.read(request(0, 1, 2, 3, 4), 2) == 3 * BLOCK
    assert worker.backlog(0) == pytest.approx(5 * BLOCK)


def test_what_was_used_longest_ago_goes_first_and_leaves_before_roots() -> None:
    worker = SimulatedWorker(num_blocks=3, tokens_per_s=100)
    worker.read(request(0, 1, 2), 0)
    worker.read(request(0, 5, 6), 1)
    assert list(worker.cache) == [1, 6, 5]


def test_backlog_sends_a_request_elsewhere_when_it_weighs_more_than_the_hit() -> None:
    same = [request(0, 1, 2, 3) for _ in range(2)]
    workers = [SimulatedWorker(100, 1.0) for _ in range(2)]
    assert hit_rate(same, workers, 0.0) == pytest.approx(1 / 3)
    workers = [SimulatedWorker(100, 1.0) for _ in range(2)]
    assert hit_rate(same, workers, 1.0) == 0
    assert perfect_hit_rate(same, 2, 100, 1.0) == pooled_hit_rate(same, 200) == pytest.approx(1 / 3)


@pytest.mark.long
async def test_a_fleet_answers_a_trace(trace: Path) -> None:
    requests = read_trace(10, trace)
    fleet = NullFleet(prefill=2, decode=1, gateways=(("round-robin", "require"),), prefill_blocks=64, decode_blocks=64)
    async with running(fleet) as gateways:
        replayed = await replay(requests, [gateway.grpc for gateway in gateways], MODEL)
    found = figures(replayed, tokens_read("prefill"))
    assert found["answered"] == 8
    assert not found["errors"]
    assert all(one.remote and one.answer and one.answer.tokens == 3 for one in replayed)
    # What all have in common is computed once, or by both workers, where a fetch from the other comes too late.
    assert found["prefilled_tokens"] in [8 * 50 - cached * 2 * BLOCK for cached in (7, 6)]
    assert found["hit_rate"] == pytest.approx(1 - found["prefilled_tokens"] / (8 * 50))
