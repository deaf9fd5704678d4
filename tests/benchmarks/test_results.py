from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.results import Arrival, Figure, Metric, TimedAnswer, decode_rate, goodput, percentile, throughput, wall

pytestmark = pytest.mark.fast


def answer(sent: float, *times: float, tokens: float = 1) -> TimedAnswer:
    return TimedAnswer(sent, tuple(Arrival(at, tokens) for at in times), prompt_tokens=4)


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0.01, 100))
def test_a_percentile_is_the_smallest_value_that_enough_do_not_exceed(values: list[float], percent: float) -> None:
    found = percentile(values, percent)
    enough = len(values) * percent / 100 - 1e-9
    assert found in values
    assert sum(v <= found for v in values) >= enough
    assert sum(v < found for v in values) < enough or found == min(values)


def test_an_answer_gives_its_latencies() -> None:
    one = answer(1.0, 1.5, 1.6, 2.0)
    assert one.ttft == 0.5
    assert one.gaps == pytest.approx([0.1, 0.4])
    assert (one.tokens, one.done) == (3, 2.0)


def test_a_chunk_of_several_tokens_is_one_gap() -> None:
    one = answer(0.0, 1.0, 2.0, tokens=4)
    assert (one.tokens, one.gaps) == (8, [1.0])


def test_throughput_counts_from_the_first_request_to_the_last_token() -> None:
    answers = [answer(0.0, 1.0, 2.0), answer(0.5, 3.0, 4.0)]
    assert wall(answers) == 4.0
    assert throughput(answers) == 1.0


def test_the_decode_phase_lies_between_the_last_first_token_and_the_first_end() -> None:
    answers = [answer(0.0, 1.0, 2.0, 3.0, 4.0), answer(0.0, 2.0, 3.0, 4.0)]
    assert decode_rate(answers) == 2.0
    assert decode_rate([answer(0.0, 1.0, 2.0), answer(0.0, 3.0, 4.0)]) == 0.0


def test_goodput_wants_the_first_token_and_every_gap_in_time() -> None:
    answers = [answer(0.0, 1.0, 1.1), answer(0.0, 3.0, 3.1), answer(0.0, 1.0, 1.5)]
    assert goodput(answers, ttft=2.0, itl=0.2) == pytest.approx(1 / 3)


def test_a_ratio_above_one_is_better_whichever_way_the_metric_points() -> None:
    assert Metric("output", "tok/s").ratio(30, 20) == 1.5
    assert Metric("itl", "ms", "lower").ratio(20, 30) == 1.5
    assert Metric("itl", "ms", "lower").best([3, 2]) == 2


def test_a_figure_is_the_median_of_its_rounds() -> None:
    assert Figure((9.0, 1.0, 2.0)).median == 2.0
