"""Layers with a window hold, cache and send no more than their window, and no token changes by that."""

from __future__ import annotations

import pytest

from tandem.block_hash import block_hashes, root_hash
from tandem.engine import Engine, Request
from tandem.engine.forward.decode_graphs import DecodeGraphs, padded
from tandem.engine.forward.forward import TorchForward
from tandem.engine.kv import KVLayout
from tandem.engine.runner import Runner
from tandem.engine.scheduling import Windows
from tests.engine.test_decode_graphs import Traced
from tests.engine.test_handoff import CopySink, disaggregated, prefill
from tests.engine.tiny import Families, assert_idle, generate, greedy, make_engine, prompt_of, run, tokens

WINDOWED = ("mistral-window", "qwen2-window", "smollm3", "gemma2", "gemma3", "gpt-oss")
BLOCK, WINDOW, LONG = 4, 8, 100
SEEN = 2  # blocks before a token's own that a window of 8 tokens may reach


def places(engine: Engine) -> list[int]:
    assert engine._pool.windows is not None
    return engine._pool.windows.at


def answer(engine: Engine, prompt: list[int], name: str = "r") -> tuple[list[int], int]:
    engine.add(Request(name, prompt, greedy(6, ignore_eos=True)))
    outputs = run(engine)[name]
    return tokens(outputs), outputs[0].num_cached_tokens


@pytest.mark.parametrize("name", WINDOWED)
def test_long_contexts_are_answered_alike_in_chunks_alone_and_from_elsewhere(name: str, family: Families) -> None:
    path, prompt = family(name)[1], prompt_of(LONG)
    whole = make_engine(path, max_num_batched_tokens=128, enable_prefix_caching=False)
    expected, _ = answer(whole, prompt)
    source, target = make_engine(path, max_num_batched_tokens=10), make_engine(path)
    for _ in range(2):
        assert disaggregated(source, target, prompt, greedy(6, ignore_eos=True)) == expected
    assert answer(target, prompt) == (expected, LONG - 1)  # the tail, too
    for engine in (whole, source, target):
        assert_idle(engine)


def test_a_layer_with_a_window_gets_its_share_of_the_memory(family: Families) -> None:
    path = family("gemma3")[1]
    budget = 1 << 20
    engine = make_engine(path, num_blocks=None, kv_budget_bytes=budget)
    layout, windows = engine.layout, engine.layout.windows
    assert windows == Windows(frozenset({0, 2}), SEEN, 4 * WINDOW // BLOCK)
    assert windows.of((0, 0), BLOCK, 100) is None
    held = [len(kv) for kv in engine.kv_cache]
    assert held[0] == held[2] == -(-held[1] * (SEEN + 2) // 8) + 1
    assert sum(held) * layout.block_bytes == layout.cache_bytes(held[1]) <= budget
    assert layout.cache_bytes(held[1] + 1) > budget
    assert held[1] > budget // layout.whole_block_bytes * 1.4


def test_a_sequence_holds_no_more_than_its_window(family: Families) -> None:
    """And blocks that leave it go to others: eight long answers run where all their blocks would never fit."""
    path = family("gemma3")[1]
    engine = make_engine(path, num_blocks=8 * 28, max_num_batched_tokens=16, enable_prefix_caching=False)
    windows = engine._pool.windows
    assert windows is not None
    assert windows.num_places < 8 * 28
    prompts = [prompt_of(LONG, seed) for seed in range(8)]
    expected = [answer(make_engine(path), prompt)[0] for prompt in prompts]
    for number, prompt in enumerate(prompts):
        engine.add(Request(str(number), prompt, greedy(6, ignore_eos=True)))
    outputs: dict[str, list[int]] = {}
    while engine.has_work():
        for output in engine.step():
            outputs.setdefault(output.request_id, []).extend(token.token_id for token in output.tokens)
        for seq in engine._live.values():
            assert seq.window_end - seq.window_start <= SEEN + 2 + 16 // BLOCK
        engine.check_integrity()
    assert [outputs[str(number)] for number in range(8)] == expected
    assert engine.stats().num_preempted == 0


def test_a_prefix_is_found_by_its_last_windows_blocks_alone(family: Families) -> None:
    path, prompt = family("gemma3")[1], prompt_of(LONG)
    engine = make_engine(path, num_blocks=64)
    expected, _ = answer(engine, prompt)
    filler = prompt_of(60, 2)
    answer(engine, filler, "other")
    table = engine._pool.match(names(engine, prompt))
    assert len(table) == LONG // BLOCK
    here = [bool(places(engine)[block]) for block in table]
    assert not all(here[:-SEEN])
    assert all(here[-SEEN:])
    assert answer(engine, prompt) == (expected, LONG - 1)


def test_without_a_windows_blocks_a_prefix_is_as_long_as_it_is_sure(family: Families) -> None:
    path, prompt = family("gemma3")[1], prompt_of(40)
    engine = make_engine(path)
    expected, _ = answer(engine, prompt)
    table, windows = engine._pool.match(names(engine, prompt)), engine._pool.windows
    assert windows is not None
    assert len(table) == 10
    windows.forget(table[8])
    assert len(engine._pool.match(names(engine, prompt))) == 8
    assert answer(engine, prompt) == (expected, 8 * BLOCK)
    assert answer(engine, prompt) == (expected, 39)
    assert_idle(engine)


def names(engine: Engine, token_ids: list[int]) -> list[bytes]:
    root = root_hash(engine.layout.model, engine.layout.revision, "", "")
    return block_hashes(root, token_ids, BLOCK)


def test_only_a_windows_blocks_are_sent(family: Families) -> None:
    """The bytes are those of a prompt's last blocks in layers with a window, and all in the others."""
    path = family("gemma3")[1]
    source, target = make_engine(path, max_num_batched_tokens=10), make_engine(path)
    target.reserve(Request("r", prompt_of(LONG), greedy(4)))
    copy = CopySink.of(target, "r")
    prefill(source, Request("r", prompt_of(LONG), greedy(4)), copy, 0)
    blocks, layout = LONG // BLOCK, target.layout
    sent = {layer: sum(count for at, _, count in copy.pushed if at == layer) for layer in range(3)}
    assert sent == {0: SEEN + 1, 1: blocks, 2: SEEN + 1}
    assert sum(sent.values()) * layout.block_bytes == layout.moved_bytes(blocks)
    assert layout.moved_bytes(blocks) < 0.42 * blocks * layout.whole_block_bytes
    target.abort("r")
    assert_idle(target)


def test_layouts_with_other_windows_do_not_exchange_blocks(family: Families) -> None:
    wide = make_engine(family("gemma3")[1]).layout
    short = make_engine(family("gemma3")[1], max_model_len=WINDOW).layout
    assert short.windows is None
    assert wide.hash != short.hash
    # A layout without windows has the name that workers before windows gave it.
    assert KVLayout("m", "r", "float32", 2, 1, 8, 4).hash == "255387b799d605534ec003e65ba7276a"


@pytest.mark.usefixtures("torch_alone")  # whose operations are traced
@pytest.mark.parametrize("name", ["gemma3", "mistral-window"])
def test_decode_graphs_read_windows_where_they_lie(name: str, family: Families) -> None:
    path, prompt = family(name)[1], prompt_of(30)
    expected = generate(make_engine(path), prompt, greedy(9, ignore_eos=True))
    engine = make_engine(path)
    runner = engine._runner
    assert isinstance(runner, Runner)
    plain, windows = runner._forward, engine.layout.windows
    assert isinstance(plain, TorchForward)
    assert windows is not None
    capture = Traced()
    graphs = DecodeGraphs(
        plain, plain._model, padded(engine.kv_cache), plain._attention, capture, [(1, 16), (2, 16)], windows.layers
    )
    runner._forward = graphs
    assert generate(engine, prompt, greedy(9, ignore_eos=True)) == expected
    assert capture.count == 2
    assert_idle(engine)
