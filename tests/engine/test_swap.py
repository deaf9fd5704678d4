"""Who has to leave for whom, and where its KV waits meanwhile: tokens stay the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from tandem.engine import Engine, Request, SampledToken, SamplingParams
from tandem.engine.kv.swap import SwapSpace
from tests.engine.fake_device import DeviceTensor, HostDevice
from tests.engine.tiny import (
    BLOCK_BYTES,
    assert_idle,
    generate,
    greedy,
    make_engine,
    prompt_of,
    run,
    sampled,
    tokens,
)

BATCH, REALTIME = 10, -10


@pytest.fixture(scope="module")
def roomy(llama: Path) -> Engine:
    return make_engine(llama, enable_prefix_caching=False)


def seeded(name: str, length: int, seed: int, priority: int = 0) -> Request:
    return Request(name, prompt_of(length, seed), SamplingParams(20, temperature=1.0, seed=seed), priority)


def counter() -> Callable[[], float]:
    """A clock that shows one second more each time."""
    shown = iter(range(10**9))
    return lambda: float(next(shown))


@pytest.mark.long
@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("blocks", [0, 4, 12])
def test_swapped_or_computed_again_every_token_is_the_same(
    llama: Path, roomy: Engine, blocks: int, prefix_caching: bool
) -> None:
    engine = make_engine(
        llama, num_blocks=12, swap_memory=blocks * BLOCK_BYTES, enable_prefix_caching=prefix_caching, now=lambda: 0.0
    )
    requests = [seeded(str(n), 6 + n, n) for n in range(5)]
    for request in requests:
        engine.add(request)
    outputs = run(engine)
    for request in requests:
        assert tokens(outputs[request.request_id]) == generate(roomy, request.token_ids, request.sampling)
    stats = engine.stats()
    assert stats.num_preempted > 0
    assert (stats.num_swapped > 0) == (blocks > 0)
    assert stats.num_swapped < stats.num_preempted or blocks == 12
    assert_idle(engine)


def test_what_was_swapped_is_not_computed_again(llama: Path) -> None:
    computed = []
    for blocks in (0, 12):
        engine = make_engine(
            llama, num_blocks=12, swap_memory=blocks * BLOCK_BYTES, enable_prefix_caching=False, now=lambda: 0.0
        )
        requests = [seeded(str(n), 9, n) for n in range(3)]
        for request in requests:
            engine.add(request)
        run(engine)
        stats = engine.stats()
        computed.append(stats.num_prefilled_tokens + stats.num_written_tokens)
    assert computed[1] == 3 * (9 + 19) < computed[0]


def test_swapping_is_chosen_by_its_cost(llama: Path) -> None:
    """A copy takes a second, whatever it copies; so does a step, of 16 tokens at most."""
    engine = make_engine(llama, num_blocks=64, swap_memory=64 * BLOCK_BYTES, now=counter())
    swap = SwapSpace(engine.kv_cache, 8, now=counter())
    swap.passed(16, 1.0)
    swap.passed(1, 1.0)
    first = swap.take(16, 4)  # copies cost nothing until one has been measured
    assert first is not None
    swap.copy([(0, first[0])])
    assert swap.take(16, 4) is None  # 8 seconds of copies
    swap.copy(list(zip(range(4), first, strict=True)) * 100)
    swap.release(first)
    for _ in range(30):
        swap.copy([(block, 64 + block % 8) for block in range(64)])
    assert swap.take(16, 4) is not None  # a block takes a 64th of a second where many are copied


def test_a_copy_that_took_long_is_forgotten(llama: Path) -> None:
    engine = make_engine(llama, num_blocks=8)
    swap = SwapSpace(engine.kv_cache, 8, now=counter())
    swap.passed(16, 0.01)
    swap.copy([(0, 8)])
    tries = 0
    while (blocks := swap.take(16, 2)) is None:
        tries += 1
    assert 10 < tries < 40
    swap.release(blocks)
    swap.check_integrity([])


def test_abort_of_a_swapped_sequence_releases_the_hosts_blocks(llama: Path) -> None:
    engine = make_engine(llama, num_blocks=8, swap_memory=8 * BLOCK_BYTES, now=lambda: 0.0)
    for n in range(2):
        engine.add(seeded(str(n), 9, n))
    while engine.stats().num_swapped == 0:
        engine.step()
    engine.check_integrity()
    assert engine.abort("1")
    engine.check_integrity()
    run(engine)
    assert_idle(engine)


@pytest.mark.parametrize("swap_blocks", [0, 12])
@pytest.mark.parametrize("limit", [{"num_blocks": 12}, {"max_num_seqs": 2}])
def test_a_realtime_arrival_preempts_batch_work_in_its_next_step(
    llama: Path, roomy: Engine, limit: dict[str, int], swap_blocks: int
) -> None:
    engine = make_engine(llama, swap_memory=swap_blocks * BLOCK_BYTES, now=lambda: 0.0, **limit)
    work = [seeded(f"batch{n}", 14, n, BATCH) for n in range(2)]
    for request in work:
        engine.add(request)
    for _ in range(7):
        engine.step()
    assert engine.stats().num_running == 2
    urgent = seeded("urgent", 14, 5, REALTIME)
    engine.add(urgent)
    assert {output.request_id for output in engine.step()} == {"urgent", "batch0"}
    assert engine.stats().num_preempted == 1
    outputs = run(engine)
    for request in (*work, urgent):
        answer = generate(roomy, request.token_ids, request.sampling)
        assert answer[-len(tokens(outputs[request.request_id])) :] == tokens(outputs[request.request_id])
    assert_idle(engine)


def test_a_realtime_reservation_preempts_at_once(llama: Path, roomy: Engine) -> None:
    """KV lands in blocks whose own KV waits in the host's memory: neither hurts the other."""
    engine = make_engine(llama, num_blocks=9, swap_memory=9 * BLOCK_BYTES, likely_answer=2, now=lambda: 0.0)
    work = seeded("batch", 14, 1, BATCH)
    engine.add(work)
    for _ in range(10):
        engine.step()
    urgent = Request("urgent", prompt_of(17, 2), greedy(6), REALTIME)
    assert engine.reserve(urgent) == 0
    assert engine.stats().num_swapped == 1
    engine.check_integrity()

    class SwapLanding:
        reading = False

        def push(self, layer: int, first_block: int, block_ids: Sequence[int], kv: torch.Tensor) -> None:
            places = engine.landing_blocks("urgent")[first_block : first_block + len(block_ids)]
            engine.kv_cache[layer][places] = kv[list(block_ids)]

    roomy.add(urgent, sink=SwapLanding(), prefill_only=True)
    engine.join("urgent", sampled(run(roomy)["urgent"])[0])
    outputs = run(engine)
    assert tokens(outputs["urgent"]) == generate(roomy, urgent.token_ids, urgent.sampling)[1:]
    answer = generate(roomy, work.token_ids, work.sampling)
    assert answer[-len(tokens(outputs["batch"])) :] == tokens(outputs["batch"])
    assert_idle(engine)


def test_nobody_is_preempted_where_it_would_not_do(llama: Path) -> None:
    engine = make_engine(llama, num_blocks=8)
    engine.reserve(Request("parked", prompt_of(14, 1), greedy(3), BATCH))
    engine.add(Request("running", prompt_of(8, 2), greedy(6), BATCH))
    engine.step()
    assert engine.reserve(Request("urgent", prompt_of(20, 3), greedy(2), REALTIME)) is None
    engine.add(Request("same", prompt_of(20, 3), greedy(2), BATCH))
    engine.step()
    assert engine.stats().num_preempted == 0
    engine.join("parked", SampledToken(5))
    assert len(run(engine)) == 3


def test_blocks_go_through_pinned_memory_in_copies_that_nobody_waits_for() -> None:
    with HostDevice() as device:
        caches = [DeviceTensor(torch.arange(12 * 16).view(12, 2, 2, 2, 2) + 1000.0 * layer) for layer in range(2)]
        expected = [cache.host.clone() for cache in caches]
        swap = SwapSpace(caches, 8, counter())
        taken = swap.take(9, 4), swap.take(9, 4)
        assert taken == ([12, 13, 14, 15], [16, 17, 18, 19])
        out = list(zip([3, 9, 0, 7, 5], [13, 19, 12, 16, 15], strict=True))
        swap.copy(out)
        for cache in caches:
            cache.host.zero_()
        swap.copy([(there, here) for here, there in reversed(out)])
        assert device.waits == []
    for cache, whole in zip(caches, expected, strict=True):
        kept = [here for here, _ in out]
        assert torch.equal(cache.host[kept], whole[kept])
        assert cache.host.count_nonzero() == whole[kept].count_nonzero(), "no other block is written"
