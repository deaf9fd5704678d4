"""Who goes before whom where there is not room for all; each of these a change that nothing else would notice."""

from __future__ import annotations

from pathlib import Path

from tandem.engine import Engine, Request, SampledToken
from tests.engine.tiny import assert_idle, greedy, make_engine, prompt_of, run


def stepped_until_preempted(engine: Engine) -> None:
    for _ in range(60):
        if engine.stats().num_preempted:
            return
        engine.step()
    raise AssertionError("nobody was preempted")


def test_one_that_was_preempted_goes_on_before_shorter_ones_that_came_later(llama: Path) -> None:
    engine = make_engine(llama, num_blocks=12, likely_answer=8, enable_prefix_caching=False)
    engine.add(Request("first", prompt_of(7), greedy(28)))
    engine.step()
    engine.reserve(Request("joined", prompt_of(9, 1), greedy(28)))
    engine.join("joined", SampledToken(2))  # its prompt was never in line: it has no turn yet
    stepped_until_preempted(engine)
    engine.add(Request("short", prompt_of(2, 2), greedy(2)))
    got = list[str]()
    while engine.has_work():
        got += [output.request_id for output in engine.step()]
        engine.check_integrity()
    assert got.index("joined") < got.index("short")
    assert_idle(engine)


def test_one_that_was_preempted_goes_on_before_a_shorter_one_that_has_waited_for_its_seat(llama: Path) -> None:
    engine = make_engine(llama, num_blocks=18, max_num_seqs=2, enable_prefix_caching=False)
    engine.add(Request("first", prompt_of(7), greedy(28)))
    engine.step()
    engine.add(Request("long", prompt_of(40, 1), greedy(28)))
    engine.step()
    engine.add(Request("short", prompt_of(2, 2), greedy(2)))  # whose turn is before that of the long one
    stepped_until_preempted(engine)
    got = list[str]()
    while engine.has_work():
        got += [output.request_id for output in engine.step()]
    assert got.index("long") < got.index("short")
    assert_idle(engine)


def test_equals_preempt_nobody(llama: Path) -> None:
    engine = make_engine(llama, num_blocks=8, enable_prefix_caching=False)
    engine.add(Request("running", prompt_of(15), greedy(12)))
    engine.step()
    assert engine.reserve(Request("same", prompt_of(16, 1), greedy(4))) is None
    engine.add(Request("same too", prompt_of(20, 2), greedy(4)))
    engine.step()
    assert (engine.stats().num_running, engine.stats().num_waiting, engine.stats().num_preempted) == (1, 1, 0)
    assert engine.reserve(Request("urgent", prompt_of(16, 1), greedy(4), priority=-1)) is not None
    assert engine.stats().num_preempted == 1
    engine.abort("urgent")
    run(engine)
    assert_idle(engine)


def test_equals_that_have_room_come_in_their_turn_all_the_same(llama: Path) -> None:
    """Not before others: this one waits for the prefix that another is computing."""
    engine = make_engine(llama)
    engine.add(Request("long", prompt_of(40), greedy(2)))
    engine.step()
    engine.add(Request("shares", [*prompt_of(40), 5], greedy(2)))
    engine.step()
    assert (engine.stats().num_running, engine.stats().num_waiting) == (1, 1)
    assert run(engine)["shares"][0].num_cached_tokens == 40
    assert_idle(engine)


def test_a_reservation_leaves_a_block_for_each_that_runs(llama: Path) -> None:
    engine = make_engine(llama, num_blocks=8, enable_prefix_caching=False)
    for name in ("a", "b"):
        engine.add(Request(name, prompt_of(3), greedy(9)))
    engine.step()
    assert engine.stats().free_blocks == 6
    assert engine.reserve(Request("too large", prompt_of(16), greedy(4)), outranks=False) is None
    assert engine.reserve(Request("too large", prompt_of(16), greedy(4))) is None
    assert engine.reserve(Request("leaves two", prompt_of(12), greedy(4))) is not None
    engine.step()
    assert (engine.stats().num_running, engine.stats().num_preempted) == (2, 0)
    engine.abort("leaves two")
    run(engine)
    assert_idle(engine)


def test_nobody_passes_one_that_waits_for_room(llama: Path) -> None:
    engine = make_engine(llama, num_blocks=8, enable_prefix_caching=False)
    engine.add(Request("running", prompt_of(7), greedy(6)))
    engine.step()
    engine.add(Request("large", prompt_of(28, 1), greedy(2)))
    engine.add(Request("small", prompt_of(3, 2), greedy(2), priority=1))
    got = list[str]()
    while engine.has_work():
        got += [output.request_id for output in engine.step()]
    assert got.index("large") < got.index("small")
    assert got.count("running") == 5
    assert_idle(engine)
