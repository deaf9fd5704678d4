"""The mixes that auto is measured on, and what counts as good."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.auto import ITL_S, MOST_PER_S, TTFT_S, figures, kinds, middle, mixed
from benchmarks.fleet import NullFleet, simulate
from benchmarks.results import Arrival, TimedAnswer, earlier
from benchmarks.traffic import BLOCK, Replayed, TraceRequest


def conversation(second: int, blocks: int) -> TraceRequest:
    """All begin with the same block."""
    names = (0, *(1000 * second + i for i in range(blocks - 1)))
    return TraceRequest(0.0, BLOCK * blocks, 1, names)


TRACE = [conversation(1, 3), conversation(2, 20), conversation(3, 5), conversation(3, 9), conversation(4, 1)]


def test_conversations_are_told_apart_by_their_second_block() -> None:
    assert kinds(TRACE) == ["short", "long", "turns", "turns", "short"]


def test_a_mix_is_as_much_as_the_capacity_reads_when_all_is_cached_that_can_be() -> None:
    turns = [conversation(s, blocks) for s in range(1, 60) for blocks in (10, 19)]
    requests = mixed(turns, ["turns"], capacity=100.0, seconds=10.0)
    unread = sum(r.prompt_tokens - (BLOCK * 10 if i % 2 else BLOCK * (i > 0)) for i, r in enumerate(requests))
    assert 1000 <= unread < 1000 + 20 * BLOCK
    assert requests == sorted(requests, key=lambda r: r.at)
    assert len(mixed(turns * 20, ["turns"], capacity=1e9, seconds=1.0)) == MOST_PER_S


def test_a_request_is_good_when_every_token_was_in_time_and_bad_when_there_was_none() -> None:
    request = TRACE[0]

    def replayed(*times: float) -> Replayed:
        return Replayed(request, TimedAnswer(0.0, tuple(Arrival(at, 1) for at in times), 48), remote=True)

    good = replayed(TTFT_S, TTFT_S + ITL_S / 2)
    late, slow = replayed(TTFT_S * 1.1), replayed(0.1, 0.1 + 2 * ITL_S)
    found = figures([good, late, slow, Replayed(request, None, error="UNAVAILABLE: gone")])
    assert found["goodput"] == 0.25
    assert found["in_time_ttft"] == 0.5
    assert found["local"] == 0.25
    assert found["errors"] == {"UNAVAILABLE: gone": 1}


def test_of_several_rounds_the_one_of_median_goodput_counts() -> None:
    rounds = [{"goodput": goodput, "local": goodput / 2} for goodput in (0.9, 0.2, 1.0)]
    assert middle(rounds) == {"goodput": 0.9, "local": 0.45, "goodputs": [0.9, 0.2, 1.0]}
    assert middle(rounds[:2])["goodput"] == 0.2


def test_results_are_kept_for_the_same_setting_only(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    assert earlier(path, {"a": (1,)}, "found") == {}
    path.write_text(json.dumps({"setting": {"a": (1,)}, "found": {"x": 1}}), encoding="utf-8")
    assert earlier(path, {"a": (1,)}, "found") == {"x": 1}
    assert earlier(path, {"a": (2,)}, "found") == {}


@pytest.mark.parametrize("blocks", [1, 8])
def test_up_to_128_tokens_is_short(blocks: int) -> None:
    assert kinds([conversation(1, blocks)]) == ["short"]
    assert kinds([conversation(1, 9)]) == ["long"]


@pytest.mark.parametrize(("policy", "remote"), [("tandem", True), ("local", False)])
def test_a_simulated_fleet_answers_alike_each_time(policy: str, remote: bool) -> None:
    fleet = NullFleet(1, 1, gateways=((policy, "prefer"),))
    requests = [TraceRequest(0.05 * i, 3 * BLOCK, 5, (i, i + 100, i + 200)) for i in range(20)]
    one, other = simulate(fleet, [], requests), simulate(fleet, [], requests)
    assert one == other
    assert [(replayed.error, replayed.remote) for replayed in one] == [("", remote)] * len(requests)
    assert {sum(arrival.tokens for arrival in replayed.answer.arrivals) for replayed in one if replayed.answer} == {5}
