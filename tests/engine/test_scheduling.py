"""Continuous batching, chunked prefill, priorities, preemption, aborts and the prefix cache, on a real model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tandem.block_hash import block_hashes, root_hash
from tandem.engine import (
    BlockRemoved,
    BlockStored,
    Engine,
    FinishReason,
    Request,
    SampledToken,
    SamplingParams,
    SequenceOutput,
)
from tests.engine.tiny import assert_idle, generate, greedy, make_engine, prompt_of, run, sampled, tokens


@pytest.fixture(scope="module")
def roomy(llama: Path) -> Engine:
    """The oracle: one request at a time, nothing cached, the whole prompt in one chunk."""
    return make_engine(llama, max_num_batched_tokens=128, enable_prefix_caching=False)


def first_steps(engine: Engine, num_steps: int) -> list[set[str]]:
    return [{output.request_id for output in engine.step()} for _ in range(num_steps)]


def test_a_batch_gives_everyone_what_they_get_alone(llama: Path, roomy: Engine) -> None:
    engine = make_engine(llama)
    requests = [
        Request(str(n), prompt_of(n, seed=n), SamplingParams(max_tokens=9, temperature=n % 3, seed=n))
        for n in (1, 3, 4, 5, 12, 16, 19, 30)
    ]  # fmt: skip
    for request in requests:
        engine.add(request)
    outputs = run(engine)
    for request in requests:
        assert tokens(outputs[request.request_id]) == generate(roomy, request.token_ids, request.sampling)
    assert_idle(engine)


def test_decode_goes_on_while_a_long_prompt_is_prefilled(llama: Path) -> None:
    engine = make_engine(llama, max_num_batched_tokens=8)
    engine.add(Request("short", prompt_of(4), greedy(20)))
    engine.step()
    engine.add(Request("long", prompt_of(40), greedy(2)))
    assert first_steps(engine, 5) == [{"short"}] * 5
    assert first_steps(engine, 1) == [{"short", "long"}]  # 40 tokens in 6 chunks of 7


def test_a_long_prompt_is_cut_small_only_beside_a_decode(llama: Path) -> None:
    engine = make_engine(llama, max_num_batched_tokens=128, max_prefill_beside_decode=10)
    engine.add(Request("short", prompt_of(4), greedy(5)))
    engine.step()
    engine.add(Request("long", prompt_of(60, seed=1), greedy(9)))
    assert first_steps(engine, 3) == [{"short"}] * 3
    assert engine.stats().queued_tokens == 30
    assert first_steps(engine, 1) == [{"short"}]  # its last one
    assert first_steps(engine, 1) == [{"long"}]  # 20 tokens left, in one step


def test_order_is_priority_then_arrival(llama: Path) -> None:
    engine = make_engine(llama, max_num_seqs=1)
    for name, priority in (("late", 1), ("first", 0), ("second", 0), ("urgent", -1)):
        engine.add(Request(name, prompt_of(3), greedy(1), priority=priority))
    assert first_steps(engine, 4) == [{"urgent"}, {"first"}, {"second"}, {"late"}]


def test_a_short_prompt_passes_a_long_one_that_is_being_prefilled(llama: Path) -> None:
    engine = make_engine(llama, max_num_batched_tokens=10)
    engine.add(Request("long", prompt_of(40), greedy(1)))
    engine.step()
    engine.add(Request("short", prompt_of(6, seed=1), greedy(1)))
    assert first_steps(engine, 1) == [{"short"}]  # and 4 tokens of the long one
    assert engine.stats().queued_tokens == 26


def test_a_long_prompt_is_passed_by_no_more_tokens_than_it_has(llama: Path) -> None:
    engine = make_engine(llama, max_num_batched_tokens=10)
    engine.add(Request("long", prompt_of(40), greedy(1)))
    ended = list[str]()
    for step in range(20):
        engine.add(Request(str(step), prompt_of(10, seed=step + 1), greedy(1)))
        ended += [output.request_id for output in engine.step()]
    assert ended.index("long") == 3
    assert ended[:3] + ended[4:] == [str(i) for i in range(len(ended) - 1)]


def test_as_many_run_as_a_step_and_the_cache_hold(llama: Path) -> None:
    assert make_engine(llama, max_num_seqs=None, max_num_batched_tokens=10).max_num_seqs == 10
    assert make_engine(llama, max_num_seqs=None, max_num_batched_tokens=128, num_blocks=64).max_num_seqs == 64
    assert make_engine(llama, max_num_seqs=99, max_num_batched_tokens=10).max_num_seqs == 10


def test_no_step_computes_more_than_its_budget(llama: Path) -> None:
    engine = make_engine(llama, max_num_batched_tokens=10, max_num_seqs=99)
    for n in range(12):
        engine.add(Request(str(n), prompt_of(5, n), greedy(30)))
    assert engine.stats().queued_tokens == 60
    engine.step()
    assert engine.stats().queued_tokens == 50
    outputs = run(engine)
    assert {len(tokens(out)) for out in outputs.values()} == {30, 29}


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_running_out_of_blocks_preempts_and_changes_no_token(llama: Path, roomy: Engine, prefix_caching: bool) -> None:
    engine = make_engine(llama, num_blocks=12, enable_prefix_caching=prefix_caching)
    requests = [Request(str(n), prompt_of(6 + n, n), SamplingParams(20, temperature=1.0, seed=n)) for n in range(4)]
    for request in requests:
        engine.add(request)
    outputs: dict[str, list[SequenceOutput]] = {request.request_id: [] for request in requests}
    preempted = False
    while engine.has_work():
        running = engine.stats().num_running
        step = engine.step()
        engine.check_integrity()
        preempted |= engine.stats().num_running + sum(o.finished for o in step) < running
        for output in step:
            outputs[output.request_id].append(output)
    assert preempted
    for request in requests:
        assert tokens(outputs[request.request_id]) == generate(roomy, request.token_ids, request.sampling)
        assert [o.first_index for o in outputs[request.request_id]] == list(range(20))
        assert {o.num_cached_tokens for o in outputs[request.request_id]} == {0}  # its own blocks are no hit
    assert_idle(engine)


def test_a_preempted_prefill_pushes_each_block_once(llama: Path) -> None:
    pushed: list[int] = []

    class Record:
        reading = False

        def push(self, layer: int, first_block: int, block_ids: Sequence[int], kv: torch.Tensor) -> None:
            assert len(kv) == 12
            assert block_ids
            if layer == 0:
                pushed.extend(range(first_block, first_block + len(block_ids)))

    engine = make_engine(llama, num_blocks=12, enable_prefix_caching=False, max_num_batched_tokens=6)
    engine.add(Request("a", prompt_of(3), greedy(40)))
    engine.step()
    engine.add(Request("b", prompt_of(38), greedy(1)), sink=Record(), prefill_only=True)
    while engine.stats().num_running == 2 or not pushed:
        engine.step()
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting) == (1, 1)
    assert 0 < len(pushed) < 10
    run(engine)
    assert pushed == list(range(10))


def test_reserved_sequences_are_preempted_once_they_outgrow_what_was_likely(llama: Path) -> None:
    engine = make_engine(llama, num_blocks=12, likely_answer=8)
    engine.add(Request("added", prompt_of(7), greedy(30)))
    engine.step()
    engine.reserve(Request("reserved", prompt_of(5, 1), greedy(23), priority=9))
    engine.join("reserved", sampled(run_until_tokens(engine, "added"))[0])
    while engine.stats().num_waiting == 0:
        engine.step()
    assert engine.reserve(Request("late", prompt_of(2), greedy(2), priority=10)) is None  # it does not pass
    outputs = run(engine)
    assert outputs["added"][-1].first_index < 30
    assert outputs["reserved"][-1].first_index == 22
    assert_idle(engine)


def test_without_room_to_go_on_a_sequence_waits_and_computes_nothing(llama: Path) -> None:
    engine = make_engine(llama, num_blocks=4, enable_prefix_caching=False)
    engine.add(Request("added", prompt_of(4), greedy(12)))
    engine.step()
    engine.reserve(Request("parked", prompt_of(4), greedy(4)))
    waiting = []
    for _ in range(12):
        engine.step()
        waiting.append(engine.stats().num_waiting)
    assert waiting == [0] * 4 + [1] * 8
    engine.abort("parked")
    assert run(engine)["added"][-1].first_index == 11


def test_reservations_hold_a_seat_in_the_batch(llama: Path) -> None:
    for config in ({"max_num_seqs": 2}, {"max_num_batched_tokens": 2}):
        engine = make_engine(llama, **config)
        assert engine.reserve(Request("a", prompt_of(4), greedy(4))) == 0
        assert engine.reserve(Request("b", prompt_of(4), greedy(4))) == 0
        assert engine.reserve(Request("c", prompt_of(4), greedy(4))) is None
        engine.add(Request("d", prompt_of(4), greedy(4)))
        assert engine.step() == []
        assert engine.stats().num_waiting == 1
        engine.abort("a")
        assert len(tokens(run(engine)["d"])) == 4


def run_until_tokens(engine: Engine, request_id: str) -> list[SequenceOutput]:
    for _ in range(100):
        if outputs := [o for o in engine.step() if o.request_id == request_id]:
            return outputs
    raise AssertionError(f"{request_id} got no token")


def test_abort_frees_at_once_in_any_state(llama: Path) -> None:
    engine = make_engine(llama, max_num_batched_tokens=8, max_num_seqs=3)
    engine.add(Request("decoding", prompt_of(6), greedy(30)))
    engine.step()
    engine.add(Request("prefilling", prompt_of(40), greedy(30)))
    engine.step()
    engine.reserve(Request("parked", prompt_of(6), greedy(30)))
    engine.add(Request("queued", prompt_of(6), greedy(30)))
    engine.step()
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_reserved) == (2, 1, 1)
    held = stats.num_blocks - stats.free_blocks
    for name in ("decoding", "prefilling", "parked", "queued"):
        assert engine.abort(name)
        assert not engine.abort(name)
        engine.check_integrity()
    assert_idle(engine)
    assert (engine.stats().num_aborted, engine.stats().num_aborted_blocks) == (4, held)
    assert engine.step() == []


def test_a_shared_prefix_is_computed_once(llama: Path, roomy: Engine) -> None:
    engine, prefix = make_engine(llama), prompt_of(17)
    generate(engine, prefix, greedy(3))
    for tail, cached in (([5, 6], 16), ([], 16), ([7] * 9, 16)):
        prompt = prefix + tail
        engine.add(Request("r", prompt, greedy(6)))
        outputs = run(engine)["r"]
        assert tokens(outputs) == generate(roomy, prompt, greedy(6))
        assert {o.num_cached_tokens for o in outputs} == {cached}
    engine.add(Request("r", prefix[:16], greedy(1)))
    assert run(engine)["r"][0].num_cached_tokens == 15  # never the whole prompt
    engine.add(Request("r", prefix, greedy(1), cache_salt="other"))
    assert run(engine)["r"][0].num_cached_tokens == 0


@pytest.mark.parametrize("length", [3, 16, 17, 18, 40])
@pytest.mark.parametrize("prefill_only", [False, True])
def test_answers_to_one_prompt_prefill_it_once(llama: Path, roomy: Engine, length: int, prefill_only: bool) -> None:
    engine, prompt = make_engine(llama), prompt_of(length)
    requests = [
        Request(str(i), prompt, SamplingParams(max_tokens=1 if prefill_only else 12, temperature=2.0, seed=i))
        for i in range(4)
    ]  # fmt: skip
    for request in requests:
        engine.add(request, prefill_only=prefill_only)
    outputs = run(engine)
    for request in requests:
        assert tokens(outputs[request.request_id]) == generate(roomy, prompt, request.sampling)
    cached = [outputs[request.request_id][0].num_cached_tokens for request in requests]
    assert cached == [0] + 3 * [length - 1]
    assert_idle(engine)


def test_a_copied_tail_does_not_feel_what_its_source_becomes(llama: Path, roomy: Engine) -> None:
    """The copy is made while the source's owner decodes into the very block."""

    def params(seed: int) -> SamplingParams:
        return SamplingParams(max_tokens=9, temperature=2.0, seed=seed)

    engine, prompt = make_engine(llama), prompt_of(6)
    engine.add(Request("first", prompt, params(1)))
    engine.step()
    engine.step()
    engine.add(Request("second", prompt, params(2)))
    outputs = run(engine)
    assert outputs["second"][0].num_cached_tokens == 5
    assert tokens(outputs["second"]) == generate(roomy, prompt, params(2))


def test_a_prompt_waits_for_no_more_than_it_shares(llama: Path) -> None:
    engine, prompt = make_engine(llama), prompt_of(20)
    engine.add(Request("long", prompt, greedy(1), priority=-1))
    engine.add(Request("shares", prompt[:8] + prompt_of(4, seed=2), greedy(1)))
    assert first_steps(engine, 1) == [set()]  # 16 tokens of the long one
    assert (engine.stats().num_running, engine.stats().num_waiting) == (1, 1)
    assert first_steps(engine, 1) == [{"long", "shares"}]  # 4 tokens each


@pytest.mark.parametrize("landed", [4, 2, 0, None], ids=["all", "half", "none", "given up"])
def test_a_prompt_waits_for_blocks_that_a_transfer_brings(llama: Path, landed: int | None) -> None:
    """As far as they come; and not for those that were given up, although they may still be written."""
    engine, prompt, sampling = make_engine(llama), prompt_of(17), greedy(2)
    root = root_hash(engine.layout.model, engine.layout.revision)
    chain = [root, *block_hashes(root, prompt, 4)]
    assert engine.moving.expect("coming", chain, 0) is not None
    assert engine.moving.expect("twice", chain, 0) is None
    engine.add(Request("waits", prompt, sampling))
    engine.add(Request("other", prompt_of(5, 1), greedy(1)))
    assert first_steps(engine, 2) == [{"other"}, set()]
    if landed is None:
        engine.moving.give_up("coming")
    else:
        engine.moving.land("coming", 0, landed)
    assert run(engine)["waits"][0].num_cached_tokens == 4 * (landed or 0)
    engine.moving.release("coming")
    assert_idle(engine)


def test_answers_are_cached_too(llama: Path, roomy: Engine) -> None:
    engine, prompt = make_engine(llama), prompt_of(10)
    answer = generate(engine, prompt, greedy(11))
    turn = [*prompt, *answer, 5, 6]
    engine.add(Request("r", turn, greedy(5)))
    outputs = run(engine)["r"]
    assert outputs[0].num_cached_tokens == 20
    assert tokens(outputs) == generate(roomy, turn, greedy(5))


def test_block_events_carry_the_shared_hashes(llama: Path) -> None:
    engine, prompt = make_engine(llama, num_blocks=4), prompt_of(9)
    generate(engine, prompt, greedy(1))
    root = root_hash("tiny", engine.layout.revision, "", "")
    hashes = tuple(block_hashes(root, prompt, 4))
    assert engine.take_block_events() == [BlockStored(hashes, root)]
    generate(engine, prompt_of(13, seed=9), greedy(1))
    removed, stored = engine.take_block_events()
    assert removed == BlockRemoved(hashes[::-1])
    assert isinstance(stored, BlockStored)
    assert len(stored.hashes) == 3


def test_without_a_prefix_cache_nothing_is_found(llama: Path) -> None:
    engine = make_engine(llama, enable_prefix_caching=False)
    for _ in range(2):
        engine.add(Request("r", prompt_of(20), greedy(2)))
        assert run(engine)["r"][0].num_cached_tokens == 0
    assert engine.take_block_events() == []


def test_what_others_left_in_a_block_is_never_read(llama: Path, roomy: Engine) -> None:
    engine = make_engine(llama, max_num_batched_tokens=7)
    engine.reserve(Request("parked", prompt_of(9), greedy(1)))  # its blocks stay as they are
    for kv in engine.kv_cache:
        kv.fill_(float("nan"))
    for n, length in enumerate((3, 9, 12, 18)):
        engine.add(Request(str(n), prompt_of(length, n), greedy(8)))
    outputs = run(engine)
    for n, length in enumerate((3, 9, 12, 18)):
        assert tokens(outputs[str(n)]) == generate(roomy, prompt_of(length, n), greedy(8))


def test_logits_that_are_not_numbers_fail_their_sequence_alone(llama: Path) -> None:
    engine = make_engine(llama)
    alone = generate(engine, prompt_of(6, 1), greedy(6))
    engine.reserve(Request("bad", prompt_of(6), greedy(6)))
    engine.kv_cache[0][engine.landing_blocks("bad")] = float("nan")
    engine.join("bad", SampledToken(2))
    engine.add(Request("good", prompt_of(6, 1), greedy(6)))
    outputs = run(engine)
    assert [o.error for o in outputs["bad"]] == ["the model's logits are not finite numbers"]
    assert outputs["bad"][0].finished
    assert tokens(outputs["good"]) == alone
    assert_idle(engine)


def test_stop_and_length(llama: Path) -> None:
    engine, prompt = make_engine(llama), prompt_of(11)
    answer = generate(engine, prompt, greedy(8))
    stop = next(n for n in range(1, 8) if answer[n] not in answer[:n])
    engine.add(Request("stop", prompt, greedy(8, stop_token_ids=frozenset({answer[stop]}))))
    engine.add(Request("length", prompt, greedy(3)))
    engine.add(Request("context", prompt_of(125), greedy(100)))
    outputs = run(engine)
    assert tokens(outputs["stop"]) == answer[: stop + 1]
    assert [o.finish_reason for o in outputs["stop"]] == [None] * stop + [FinishReason.STOP]
    assert outputs["length"][-1].finish_reason is FinishReason.LENGTH
    assert len(tokens(outputs["context"])) == 3
    assert outputs["context"][-1].finish_reason is FinishReason.LENGTH
