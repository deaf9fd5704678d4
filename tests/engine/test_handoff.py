"""Prefill on one engine, decode on another: the tokens are those of one engine doing both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.engine import Engine, FinishReason, Request, SampledToken, SamplingParams, SequenceOutput
from tests.engine.tiny import assert_idle, generate, greedy, make_engine, prompt_of, run, tokens

BLOCK = 4
SEEDED = SamplingParams(max_tokens=10, temperature=1.3, top_p=0.95, seed=11)


@dataclass
class CopySink:
    """Puts pushed blocks where the decode engine wants them."""

    target: Engine
    landing: list[int]
    places: list[int]
    pushed: list[tuple[int, int, int]] = field(default_factory=list)
    reading: bool = False

    @classmethod
    def of(cls, target: Engine, request_id: str) -> CopySink:
        return cls(target, target.landing_blocks(request_id), target.landing_places(request_id))

    def push(self, layer: int, first_block: int, block_ids: Sequence[int], kv: torch.Tensor) -> None:
        assert block_ids
        windows = self.target.layout.windows
        landing = self.places if windows and layer in windows.layers else self.landing
        places = landing[first_block : first_block + len(block_ids)]
        self.target.kv_cache[layer][places] = kv[list(block_ids)]
        self.pushed.append((layer, first_block, len(block_ids)))


@pytest.fixture(scope="module", params=["auto", "int8"])
def engines(request: pytest.FixtureRequest, llama: Path) -> tuple[Engine, Engine, Engine]:
    """Prefill, decode, and the one that does both."""
    kv: dict[str, Any] = {"kv_cache_dtype": request.param}
    one = make_engine(llama, enable_prefix_caching=False, **kv)
    return make_engine(llama, max_num_batched_tokens=10, **kv), make_engine(llama, **kv), one


def prefill(source: Engine, request: Request, copy: CopySink, first_block: int) -> SequenceOutput:
    source.add(request, sink=copy, first_block=first_block, prefill_only=True)
    (output,) = run(source)[request.request_id]
    assert output.finished
    assert output.first_index == 0
    assert len(output.tokens) == 1
    return output


def _first_pushed(target: Engine, layer: int, num_cached: int) -> int:
    """Returns the first block that `layer` gets of a prompt: with a window, that of the tokens which later ones see."""
    windows = target.layout.windows
    if windows is None or layer not in windows.layers:
        return num_cached
    return windows.first_moved(num_cached, len(target.landing_blocks("r")))


def disaggregated(source: Engine, target: Engine, prompt: list[int], sampling: SamplingParams) -> list[int]:
    request = Request("r", prompt, sampling)
    cached = target.reserve(request)
    assert cached is not None
    assert cached % BLOCK == 0
    assert cached < len(prompt)
    copy = CopySink.of(target, "r")
    assert len(copy.landing) == -(-len(prompt) // BLOCK)
    assert not target.has_work()
    first = prefill(source, request, copy, cached // BLOCK)
    layers = range(target.layout.num_layers)
    pushed = {
        layer: [b for at, start, n in copy.pushed if at == layer for b in range(start, start + n)] for layer in layers
    }
    for layer, blocks in pushed.items():
        assert blocks == list(range(_first_pushed(target, layer, cached // BLOCK), len(copy.landing)))
    ended = target.join("r", first.tokens[0])
    outputs = [ended] if ended else run(target)["r"]
    assert [o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True]
    numbered = [o.first_index + i for o in outputs for i in range(len(o.tokens))]
    assert numbered == list(range(1, 1 + len(numbered)))
    assert all(o.num_cached_tokens == cached for o in outputs)
    if first.finish_reason is not None:
        assert [(o.tokens, o.finish_reason) for o in outputs] == [([], first.finish_reason)]
    return tokens([first, *outputs])


@pytest.mark.long
@pytest.mark.parametrize("sampling", [greedy(10), SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, 23, 24, 25])
def test_tokens_equal_one_engines(
    engines: tuple[Engine, Engine, Engine], length: int, sampling: SamplingParams
) -> None:
    source, target, one = engines
    prompt = prompt_of(length, seed=length)
    expected = generate(one, prompt, sampling)
    assert len(expected) == 10
    for _ in range(2):  # the second time both prefix caches hold most of the prompt
        assert disaggregated(source, target, prompt, sampling) == expected
    assert_idle(source)
    assert_idle(target)


@pytest.mark.parametrize("length", [7, 8, 9])
def test_one_token_and_stop_as_the_first(engines: tuple[Engine, Engine, Engine], length: int) -> None:
    source, target, one = engines
    prompt = prompt_of(length, seed=100 + length)
    first = generate(one, prompt, greedy(1))
    assert disaggregated(source, target, prompt, greedy(1)) == first
    stop = greedy(5, stop_token_ids=frozenset(first))
    assert disaggregated(source, target, prompt, stop) == first == generate(one, prompt, stop)
    assert_idle(target)


def test_the_last_possible_prompt_length(engines: tuple[Engine, Engine, Engine]) -> None:
    source, target, one = engines
    for length in (126, 127):
        prompt = prompt_of(length, seed=length)
        expected = generate(one, prompt, greedy(5))
        assert len(expected) == 128 - length
        assert disaggregated(source, target, prompt, greedy(5)) == expected


def test_kv_bytes_are_the_prompts_own(llama: Path) -> None:
    source, target, one = make_engine(llama), make_engine(llama), make_engine(llama, max_num_batched_tokens=64)
    prompt = prompt_of(13)
    request = Request("r", prompt, greedy(4))
    target.reserve(request)
    landing = target.landing_blocks("r")
    prefill(source, request, CopySink(target, landing, []), 0)
    one.reserve(Request("r", prompt, greedy(4)))
    reference = one.landing_blocks("r")
    prefill(
        make_engine(llama, max_num_batched_tokens=64), Request("r", prompt, greedy(4)), CopySink(one, reference, []), 0
    )
    for here, there in zip(target.kv_cache, one.kv_cache, strict=True):
        torch.testing.assert_close(here[landing], there[reference], atol=1e-5, rtol=1e-5)


def test_each_chunk_pushes_what_it_completes(llama: Path) -> None:
    source, target = make_engine(llama, max_num_batched_tokens=6), make_engine(llama)
    request = Request("r", prompt_of(15), greedy(4))
    target.reserve(request)
    copy = CopySink.of(target, "r")
    source.add(request, sink=copy, prefill_only=True)
    steps = []
    while source.has_work():
        source.step()
        steps.append([block for layer, *block in copy.pushed if layer == 2])
        copy.pushed.clear()
    assert steps == [[[0, 1]], [[1, 2]], [[3, 1]]]


def test_a_failing_sink_fails_its_sequence_alone(llama: Path) -> None:
    class BrokenSink:
        calls = 0
        reading = False

        def push(self, *_: object) -> None:
            self.calls += 1
            raise ConnectionError("peer is gone")

    engine, broken = make_engine(llama), BrokenSink()
    alone = generate(engine, prompt_of(6, 1), greedy(6))
    engine.add(Request("bad", prompt_of(30), greedy(6)), sink=broken, prefill_only=True)
    engine.add(Request("good", prompt_of(6, 1), greedy(6)))
    outputs = run(engine)
    (failed,) = outputs["bad"]
    assert failed.error == "KV push failed: ConnectionError: peer is gone"
    assert (failed.finished, failed.tokens, failed.finish_reason) == (True, [], None)
    assert broken.calls == 1
    assert tokens(outputs["good"]) == alone
    assert_idle(engine)


def test_reservations_wait_outside_and_hold_their_blocks(llama: Path) -> None:
    engine = make_engine(llama, num_blocks=8)
    assert engine.reserve(Request("a", prompt_of(9), greedy(11))) == 0
    stats = engine.stats()
    assert (stats.num_reserved, stats.free_blocks, stats.queued_tokens) == (1, 3, 0)
    assert engine.reserve(Request("b", prompt_of(9), greedy(4))) is None
    assert engine.reserve(Request("b", prompt_of(8), greedy(4))) == 0
    assert engine.step() == []
    engine.check_integrity()
    assert engine.abort("a")
    assert engine.abort("b")
    assert_idle(engine)


def test_a_reservation_whose_first_token_is_its_last_ends_as_it_joins(llama: Path) -> None:
    engine = make_engine(llama)
    engine.reserve(Request("a", prompt_of(5), greedy(1)))
    output = engine.join("a", SampledToken(3))
    assert output is not None
    assert (output.first_index, output.tokens, output.finish_reason) == (1, [], FinishReason.LENGTH)
    assert output.finished
    assert not engine.abort("a")
    assert engine.step() == []
    assert_idle(engine)


def test_prefill_says_whether_decode_should_go_on(llama: Path) -> None:
    engine = make_engine(llama)
    prompt = prompt_of(5)
    (token,) = generate(engine, prompt, greedy(1))
    for sampling, reason in (
        (greedy(1), FinishReason.LENGTH),
        (greedy(2), None),
        (greedy(2, stop_token_ids=frozenset({token})), FinishReason.STOP),
    ):
        engine.add(Request("r", prompt, sampling), prefill_only=True)
        (output,) = run(engine)["r"]
        assert (output.finish_reason, output.finished) == (reason, True)
        assert_idle(engine)


def test_join_and_landing_need_a_reservation(llama: Path) -> None:
    engine = make_engine(llama)
    engine.add(Request("a", prompt_of(5), greedy(2)))
    for call in (lambda: engine.join("a", SampledToken(1)), lambda: engine.landing_blocks("b")):
        with pytest.raises(ValueError, match=r"request_id: '[ab]' holds no reservation"):
            call()
    engine.reserve(Request("c", prompt_of(5), greedy(2)))
    with pytest.raises(ValueError, match="first_token: 96 is outside the vocabulary"):
        engine.join("c", SampledToken(96))


@pytest.mark.parametrize("sampling", [greedy(25), SamplingParams(max_tokens=25, temperature=1.3, seed=11)])
def test_more_are_let_in_than_fit_whole_and_all_end_exactly(llama: Path, sampling: SamplingParams) -> None:
    """Eight need nine blocks each, of twenty: four begin at once."""
    source, target, one = make_engine(llama), make_engine(llama, num_blocks=20, likely_answer=8), make_engine(llama)
    prompts = {f"r{i}": prompt_of(9, seed=i) for i in range(8)}
    waiting, most, found = dict(prompts), 0, {name: list[int]() for name in prompts}
    for _ in range(500):
        for name, prompt in list(waiting.items()):
            request = Request(name, prompt, sampling)
            if target.reserve(request) is None:
                break
            first = prefill(source, request, CopySink.of(target, name), 0)
            target.join(name, first.tokens[0])
            found[name].append(first.tokens[0].token_id)
            del waiting[name]
        most = max(most, target.stats().num_running)
        for output in target.step():
            found[output.request_id] += tokens([output])
        target.check_integrity()
    assert most >= 4
    assert found == {name: generate(one, prompt, sampling) for name, prompt in prompts.items()}
    assert_idle(target)


@pytest.mark.parametrize("length", [32, 33, 38])
def test_several_answers_share_a_prompts_blocks(llama: Path, length: int) -> None:
    """The first one's prompt lands; the others prefill one token of it and hold a copy of its last block."""
    source, target, one = make_engine(llama), make_engine(llama), make_engine(llama)
    prompt, sampling = prompt_of(length, seed=5), [replace(SEEDED, max_tokens=6, seed=seed) for seed in range(8)]
    first = Request("0", prompt, sampling[0])
    target.reserve(first)
    output = prefill(source, first, CopySink.of(target, "0"), 0)
    target.join("0", output.tokens[0])
    found = {"0": tokens([output])}
    before = target.stats()
    for i in range(1, 8):
        target.add(Request(str(i), prompt, sampling[i]))
    outputs = target.step()
    after = target.stats()
    assert after.num_prefilled_tokens - before.num_prefilled_tokens <= 7
    blocks = before.num_blocks - after.free_blocks
    alone = -(-(length + 6) // BLOCK)
    assert blocks <= alone + 7 * 3
    for output in outputs:
        found[output.request_id] = found.get(output.request_id, []) + tokens([output])
    for name, rest in run(target).items():
        found[name] = found.get(name, []) + tokens(rest)
    assert found == {str(i): generate(one, prompt, sampling[i]) for i in range(8)}
    assert_idle(target)


@dataclass
class ReadingSink:
    """Copies nothing yet."""

    reading: bool = True
    tables: list[list[int]] = field(default_factory=list)

    def push(self, layer: int, first_block: int, block_ids: Sequence[int], kv: torch.Tensor) -> None:
        self.tables += [list(block_ids)]


@pytest.mark.parametrize("ending", ["first token", "abort"])
def test_blocks_that_a_sink_still_reads_stay_as_they_are_though_their_sequence_has_left(
    llama: Path, ending: str
) -> None:
    engine, sink = make_engine(llama, num_blocks=8), ReadingSink()
    engine.add(Request("r", prompt_of(17), greedy(4)), sink=sink, prefill_only=True)
    while engine.request_ids():
        engine.step()
        if ending == "abort" and sink.tables:
            engine.abort("r")
    engine.check_integrity()
    held = sorted({block for table in sink.tables for block in table})
    before = [kv[held].clone() for kv in engine.kv_cache]
    assert engine.stats().free_blocks <= 8 - len(held)
    engine.add(Request("next", prompt_of(20, seed=1), greedy(6)))  # more blocks than are left
    outputs = [output for _ in range(20) for output in engine.step()]
    assert not outputs
    assert all(torch.equal(kv[held], was) for kv, was in zip(engine.kv_cache, before, strict=True))
    assert engine.has_work()
    sink.reading = False
    assert len(tokens(run(engine)["next"])) == 6
    assert_idle(engine)
    assert not engine.has_work()
