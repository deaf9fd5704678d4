"""A step is launched before the tokens of the one before are known; tokens, blocks and ends are as without that."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tandem.engine import Engine, FinishReason, Request, SamplingParams, SequenceOutput
from tandem.engine.forward.attention import TorchAttention
from tandem.engine.forward.decode_graphs import DecodeGraphs, padded
from tandem.engine.forward.forward import Forward, StepInput, TorchForward
from tandem.engine.launched import Launched
from tandem.engine.models import Decoder
from tandem.engine.runner import Runner
from tandem.engine.sampling.sampler import choose
from tandem.engine.scheduling import Sequence as TokenSequence
from tandem.engine.weights.loader import load_weights
from tests.engine.fake_device import DeviceTensor, HostDevice
from tests.engine.tiny import MAX_LEN, VOCAB, assert_idle, greedy, make_engine, prompt_of, run, tokens

LENGTHS = (3, 9, 14, 2, 21)


class Noted:
    """A Forward that notes its steps; a row of token `spoiled` of a context has no finite logits."""

    def __init__(self, forward: Forward, notes: list[str], spoiled: int) -> None:
        self._forward, self._notes, self._spoiled = forward, notes, spoiled

    def __call__(self, step: StepInput, written: Callable[[int], None] | None = None) -> Tensor:
        self._notes.append("launch")
        self._positions = step.positions
        return self._forward(step, written)

    def logits(self, hidden: Tensor, rows: Sequence[int]) -> Tensor:
        logits = self._forward.logits(hidden, rows)
        bad = [place for place, row in enumerate(rows) if int(self._positions[row]) == self._spoiled]
        if bad:
            logits[bad] = torch.nan
        return logits


class NotingRunner(Runner):
    """Notes which steps are launched behind another. `inference_mode` knows no peer of a device."""

    notes: list[str]
    execute = torch.no_grad()(Runner.execute.__wrapped__)  # type: ignore[attr-defined]

    def _launch_behind(self, step: Launched, following: Sequence[TokenSequence]) -> Launched:
        self.notes.append("behind")
        return super()._launch_behind(step, following)


def engine_of(
    llama: Path, *, overlaps: bool, graphs: bool = False, notes: list[str] | None = None, spoiled: int = -1,
    place: Callable[[Tensor], Tensor] = lambda kv: kv, **config: object,
) -> Engine:  # fmt: skip
    engine = make_engine(llama, **config)
    cache = [place(kv) for kv in engine.kv_cache]
    model = Decoder(engine.model_config, torch.float32, str(cache[0].device))
    load_weights(model, llama)
    forward: Forward = TorchForward(model, cache)
    if graphs:
        attention = TorchAttention(cache[0])
        shapes = attention.shapes(8, MAX_LEN // 4, len(cache[0]))
        with torch.no_grad():
            forward = DecodeGraphs(forward, model, padded(cache), attention, lambda run: run, shapes)
    notes = [] if notes is None else notes
    engine._runner = NotingRunner(Noted(forward, notes, spoiled), cache, choose, overlaps=overlaps)
    engine._runner.notes = notes
    engine._scheduler.overlaps = overlaps
    return engine


def sampling(dice: random.Random, seed: int) -> SamplingParams:
    """Most plain; some that cannot be launched ahead."""
    kind = dice.randrange(8)
    return SamplingParams(
        dice.randrange(1, 40), temperature=dice.choice([0.0, 0.8]), seed=seed, top_k=dice.choice([0, 5]),
        stop_token_ids=tuple(dice.sample(range(VOCAB), 6)),
        min_tokens=1 if kind == 0 else 0, logprobs=2 if kind == 1 else None,
        presence_penalty=0.5 if kind == 2 else 0.0,
    )  # fmt: skip


def request_of(number: int) -> Request:
    return Request(
        str(number), prompt_of(LENGTHS[number % 5], number), sampling(random.Random(number), number),
        priority=number % 3,
    )  # fmt: skip


@dataclass
class Played:
    tokens: dict[str, list[int]] = field(default_factory=dict)
    reasons: dict[str, FinishReason | str | None] = field(default_factory=dict)
    aborted: set[str] = field(default_factory=set)

    def take(self, outputs: list[SequenceOutput]) -> None:
        for output in outputs:
            tokens = self.tokens.setdefault(output.request_id, [])
            assert output.first_index == len(tokens)
            tokens += [token.token_id for token in output.tokens]
            if output.finished:
                self.reasons[output.request_id] = output.error or output.finish_reason


@dataclass
class KeptLayers:
    """A sink: blocks by layer."""

    layers: dict[int, list[Tensor]] = field(default_factory=dict)
    reading = False

    def push(self, layer: int, first_block: int, block_ids: Sequence[int], kv: Tensor) -> None:
        self.layers.setdefault(layer, []).extend(kv[block].clone() for block in block_ids)


def joined(engine: Engine, prefiller: Engine, number: int, ends: Played) -> bool:
    """As on a decode worker: its prompt's KV and first token come from elsewhere. False where there is no room."""
    request, kept = request_of(number), KeptLayers()
    if engine.reserve(request) is None:
        return False
    prefiller.add(request_of(number), sink=kept, prefill_only=True)
    (output,) = run(prefiller)[str(number)]
    ends.take([output])
    if output.finish_reason is not None:
        engine.abort(str(number))
        return True
    for layer, blocks in kept.layers.items():
        for block_id, block in zip(engine.landing_blocks(str(number)), blocks, strict=True):
            engine.kv_cache[layer][block_id] = block
    assert engine.join(str(number), output.tokens[0]) is None
    return True


def play(engine: Engine, prefiller: Engine, seed: int) -> Played:
    """Requests that come, join, outrank, end and are aborted, by the seed."""
    dice, ends, coming = random.Random(seed), Played(), list(range(12))
    dice.shuffle(coming)
    while coming or engine.has_work():
        if coming and dice.random() < 0.3:
            if coming[-1] % 2 == 0:
                engine.add(request_of(coming.pop()))
            elif joined(engine, prefiller, coming[-1], ends):
                coming.pop()
        if dice.random() < 0.02 and engine.request_ids():
            ends.aborted.add(name := dice.choice(engine.request_ids()))
            engine.abort(name)
        engine.check_integrity()
        ends.take(engine.step())
        engine.check_integrity()
    assert_idle(engine)
    return ends


@pytest.mark.long
@pytest.mark.parametrize("graphs", [False, True], ids=["plain", "graphs"])
@pytest.mark.parametrize("num_blocks", [14, 64])
def test_tokens_and_ends_are_those_of_an_engine_that_waits(llama: Path, num_blocks: int, graphs: bool) -> None:
    """In small pools others preempt them while a step is under way."""
    alone, prefiller = Played(), make_engine(llama)
    plain = engine_of(llama, overlaps=False)
    for number in range(12):
        plain.add(request_of(number))
        alone.take(run(plain)[str(number)])
    notes: list[str] = []
    for seed in range(12):
        engine = engine_of(llama, overlaps=True, graphs=graphs, notes=notes, num_blocks=num_blocks)
        ends = play(engine, prefiller, seed)
        for name, found in ends.tokens.items():
            assert found == alone.tokens[name][: len(found)], (seed, name)
            assert name in ends.aborted or ends.reasons[name] == alone.reasons[name], (seed, name)
        assert {*ends.reasons, *ends.aborted} == set(map(str, range(12)))
    assert notes.count("behind") > 200, "steps were launched behind others"


@pytest.mark.long
@pytest.mark.parametrize("graphs", [False, True], ids=["plain", "graphs"])
def test_the_next_step_is_launched_before_this_ones_tokens_are_waited_for(llama: Path, graphs: bool) -> None:
    expected = [tokens(outputs) for _, outputs in sorted(run_two(make_engine(llama)).items())]
    with HostDevice() as device:
        engine = engine_of(llama, overlaps=True, graphs=graphs, notes=device.waits, place=DeviceTensor)
        run_two(engine)
        device.waits.clear()
        found = [tokens(outputs) for _, outputs in sorted(run_two(engine).items())]
    assert found == expected
    happened = " ".join(what if what in ("launch", "behind") else "wait" for what in device.waits)
    first, each, last = "launch wait launch behind launch wait", " behind launch wait", " wait"
    assert happened == first + 17 * each + last


def run_two(engine: Engine) -> dict[str, list[SequenceOutput]]:
    for number in range(2):
        engine.add(Request(str(number), prompt_of(6, number), greedy(20, ignore_eos=True)))
    return run(engine)


def test_blocks_that_a_step_under_way_may_write_to_are_nobody_elses(llama: Path) -> None:
    engine = engine_of(llama, overlaps=True, num_blocks=8)
    engine.add(Request("a", prompt_of(7), greedy(20, ignore_eos=True)))
    for _ in range(4):
        engine.step()
    held = engine.stats().num_blocks - engine.stats().free_blocks
    engine.abort("a")
    assert engine.stats().num_blocks - engine.stats().free_blocks == held
    assert engine.reserve(Request("b", prompt_of(29), greedy(3))) is None, "they are written to still"
    assert engine.has_work()
    engine.step()
    engine.step()
    assert not engine.has_work()
    assert engine.reserve(Request("b", prompt_of(29), greedy(3))) is not None
    engine.abort("b")
    assert_idle(engine)


def test_a_row_without_finite_logits_ends_its_sequence_and_no_other(llama: Path) -> None:
    engines = [engine_of(llama, overlaps=overlaps, spoiled=11) for overlaps in (False, True)]
    found = []
    for engine in engines:
        engine.add(Request("long", prompt_of(9), greedy(20, ignore_eos=True)))
        engine.add(Request("short", prompt_of(3), greedy(7, ignore_eos=True)))
        outputs = run(engine)
        found.append({name: (tokens(outputs[name]), outputs[name][-1].error) for name in outputs})
        assert_idle(engine)
    assert found[0] == found[1]
    assert found[0]["long"][1] == "the model's logits are not finite numbers"
    assert found[0]["short"][1] is None


def test_an_answer_to_the_models_end_has_no_step_beyond_it(llama: Path) -> None:
    notes: list[str] = []
    engine = engine_of(llama, overlaps=True, notes=notes)
    engine.add(Request("a", prompt_of(MAX_LEN - 9), greedy(99, ignore_eos=True)))
    outputs = run(engine)["a"]
    assert outputs[-1].finish_reason is FinishReason.LENGTH
    assert len(tokens(outputs)) == 9
    assert notes.count("launch") == 8 + -(-(MAX_LEN - 9) // 16)
