"""Each rule against a plain reference, row by row; draws that follow the distribution and depend on (seed, t) alone."""

from __future__ import annotations

import ctypes
import math
from array import array
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tandem.engine import Request, SamplingParams
from tandem.engine.kernels import CpuChoose, load_library
from tandem.engine.sampling.sampler import Choose, chosen, sample, uniform
from tandem.engine.sampling.sampler import choose as torch_choose
from tandem.engine.scheduling.sequence import BlockHashes, Sequence
from tests.engine.fake_device import DeviceTensor, HostDevice
from tests.engine.tiny import generate, greedy, make_engine, prompt_of, run, sampled, tokens
from tests.marks import long_but

VOCAB = 50
PROMPT, OUTPUT = [3, 3, 7, 9, 40], [9, 11, 11, 11, 2]


@pytest.fixture(params=["torch", "kernels"])
def choose(request: pytest.FixtureRequest) -> Choose:
    if request.param == "torch":
        return torch_choose
    library = load_library()
    if library is None:
        pytest.skip("no CPU with AVX512-BF16, or no C compiler")
    return CpuChoose(library, lambda: 2)


def logits_of(rows: int, seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed))


def sequence(sampling: SamplingParams, prompt: list[int] = PROMPT, output: list[int] = OUTPUT) -> Sequence:
    return Sequence("r", (0, 0), sampling, array("q", prompt + output), len(prompt), BlockHashes(b"", 4))


def reference_scores(logits: torch.Tensor, sampling: SamplingParams) -> list[float]:
    """The scores that greedy or the draw then sees, computed token by token."""
    scores = logits.tolist()
    counts = Counter(OUTPUT)
    for token in range(len(logits)):
        score = scores[token] + sampling.logit_bias.get(token, 0.0)
        if token in PROMPT + OUTPUT:
            score = score / sampling.repetition_penalty if score > 0 else score * sampling.repetition_penalty
        score -= counts[token] * sampling.frequency_penalty + (token in counts) * sampling.presence_penalty
        masked = token in sampling.stop_token_ids and len(OUTPUT) < sampling.min_tokens
        masked |= bool(sampling.allowed_token_ids) and token not in sampling.allowed_token_ids
        masked |= any([*OUTPUT, token][-len(bad) :] == list(bad) for bad in sampling.bad_words_token_ids)
        scores[token] = -math.inf if masked else score
    return scores


def reference_probs(logits: torch.Tensor, sampling: SamplingParams) -> torch.Tensor:
    """The distribution that is drawn from, (vocab,) float64."""
    scaled = torch.tensor(reference_scores(logits, sampling), dtype=torch.float64) / sampling.temperature
    order = sorted(range(len(logits)), key=lambda token: -scaled[token])
    kept = order[: sampling.top_k or len(logits)]
    probs = torch.zeros(len(logits), dtype=torch.float64)
    probs[kept] = scaled[kept].softmax(0)
    nucleus, mass = [], 0.0
    for token in kept:
        if mass < sampling.top_p and probs[token] >= sampling.min_p * probs[kept[0]]:
            nucleus.append(token)
        mass += float(probs[token])
    filtered = torch.zeros(len(logits), dtype=torch.float64)
    filtered[nucleus] = probs[nucleus] / probs[nucleus].sum()
    return filtered


PENALTIES: list[dict[str, Any]] = [
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 0.6},
    {"presence_penalty": 1.9},
    {"presence_penalty": -1.5},
    {"frequency_penalty": 1.2},
    {"logit_bias": {4: 6.0, 9: -100.0, 49: 2.5}},
    {"min_tokens": 6, "stop_token_ids": frozenset({0, 5, 17, 60})},
    {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3, "logit_bias": {11: 3.0}},
    {"allowed_token_ids": frozenset({4, 11, 30, 31, 32})},
    {"bad_words_token_ids": (*((11, 2, token) for token in range(40)), (41,), (3, 42), (2, 43))},
]
FILTERS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.3},
    {"temperature": 2.5},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 500},
    {"top_p": 0.6},
    {"top_p": 0.001},
    {"min_p": 0.2},
    {"top_k": 9, "top_p": 0.8, "min_p": 0.05, "temperature": 1.5},
]


@pytest.mark.parametrize("params", PENALTIES, ids=lambda params: "+".join(params))
def test_penalties_equal_the_reference(params: dict[str, Any], choose: Choose) -> None:
    """Over many rows greedy must find the reference's best token; the plain sampler finds another one for some."""
    sampling, logits = greedy(20, **params), logits_of(300)
    chosen = [token.token_id for token in sample(logits, [sequence(sampling)] * 300, choose)]
    expected = [max(range(VOCAB), key=reference_scores(row, sampling).__getitem__) for row in logits]
    assert chosen == expected
    assert chosen != logits.argmax(-1).tolist()


def test_bad_words_are_the_answers_alone(choose: Choose) -> None:
    """One that begins in the prompt is none."""
    logits = logits_of(1)
    best = int(logits.argmax())
    for word, output, is_bad in (
        ((40, 9, best), [9], False), ((40, best), [], False), ((9, 40, best), [], False), ((9, best), [9], True),
        ((9, 11, best), [9, 11], True),
    ):  # fmt: skip
        row = sequence(greedy(20, bad_words_token_ids=(word,)), output=output)
        assert (sample(logits, [row], choose)[0].token_id != best) is is_bad, (word, output)


@pytest.mark.long
@pytest.mark.parametrize("params", [*FILTERS, *PENALTIES[-3:]], ids=lambda params: "+".join(params) or "plain")
def test_draws_follow_the_distribution(params: dict[str, Any], choose: Choose) -> None:
    num_draws, logits = 4000, logits_of(1, seed=5)
    base = SamplingParams(20, **params)
    expected = reference_probs(logits[0], base)
    rows = [sequence(replace(base, seed=seed)) for seed in range(num_draws)]
    counts = Counter(token.token_id for token in sample(logits.expand(num_draws, -1), rows, choose))
    observed = torch.tensor([counts[token] / num_draws for token in range(VOCAB)], dtype=torch.float64)
    assert not observed[expected == 0].any()
    spread = (expected * (1 - expected) / num_draws).sqrt()
    assert ((observed - expected).abs() <= 5 * spread + 1e-9).all()


def test_the_draw_is_the_inverse_cdf_of_its_own_number(choose: Choose) -> None:
    logits = logits_of(100)
    for row, seed in zip(logits, range(100), strict=True):
        sampling = SamplingParams(20, seed=seed, top_p=0.9)
        cdf = reference_probs(row, sampling).cumsum(0)
        expected = int((cdf <= uniform(seed, len(OUTPUT)) * cdf[-1]).sum())
        assert sample(row[None], [sequence(sampling)], choose)[0].token_id == expected


@pytest.mark.parametrize("top_p", long_but([0.9], [0.3, 0.9, 0.999]))
def test_nuclei_narrow_and_wide(top_p: float, choose: Choose) -> None:
    """Peaked rows keep a few tokens of a large vocabulary, flat ones most of it."""
    logits = torch.randn(40, 1000, generator=torch.Generator().manual_seed(3)) * torch.linspace(0.1, 9, 40)[:, None]
    rows = [sequence(SamplingParams(20, seed=seed, top_p=top_p)) for seed in range(40)]
    drawn = [token.token_id for token in sample(logits, rows, choose)]
    for row, token_id, seq in zip(logits, drawn, rows, strict=True):
        cdf = reference_probs(row, seq.sampling).cumsum(0)
        assert token_id == int((cdf <= uniform(seq.sampling.seed, len(OUTPUT)) * cdf[-1]).sum())


def test_the_random_number_depends_on_seed_and_index_alone() -> None:
    numbers = {uniform(seed, index) for seed in range(-20, 20) for index in range(20)}
    assert len(numbers) == 800
    assert all(0.0 <= number < 1.0 for number in numbers)
    assert uniform(7, 3) == 0.6042348053683142
    assert uniform(2**64 - 1, 0) == uniform(-1, 0)


def test_rows_do_not_feel_their_neighbours(choose: Choose) -> None:
    kinds = [*PENALTIES, *FILTERS, {"temperature": 0.0}, {"logprobs": 3}]
    params = [SamplingParams(20, **{"seed": n, **kind}) for n, kind in enumerate(kinds * 3)]
    logits, rows = logits_of(len(params)), [sequence(sampling) for sampling in params]
    alone = [sample(row[None], [seq], choose)[0] for row, seq in zip(logits, rows, strict=True)]
    assert sample(logits, rows, choose) == alone
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(1)).tolist()
    assert sample(logits[order], [rows[n] for n in order], choose) == [alone[n] for n in order]


def test_ties_are_kept_whatever_their_order(choose: Choose) -> None:
    logits = torch.full((1, VOCAB), -9.0)
    logits[0, [8, 21, 33]] = 2.0
    drawn = {sample(logits, [sequence(SamplingParams(9, seed=s, top_k=1))], choose)[0].token_id for s in range(60)}
    assert drawn == {8, 21, 33}


def test_temperature_near_zero_is_greedy(choose: Choose) -> None:
    logits = 1e4 * logits_of(20)
    for temperature in (1e-40, 1e-8):
        rows = [sequence(SamplingParams(20, temperature=temperature, seed=s)) for s in range(20)]
        assert [t.token_id for t in sample(logits, rows, choose)] == logits.argmax(-1).tolist()


def test_logprobs_are_the_models_own(choose: Choose) -> None:
    logits = logits_of(4)
    wanted = [None, 0, 2, VOCAB]
    rows = [sequence(SamplingParams(20, temperature=0.2, top_k=2, repetition_penalty=2.0, logprobs=n)) for n in wanted]
    out = sample(logits, rows, choose)
    expected = logits.log_softmax(-1)
    assert out[0].logprob is None
    assert [len(token.top) for token in out] == [0, 0, 2, VOCAB]
    for row, token in zip(expected[1:], out[1:], strict=True):
        assert token.logprob == pytest.approx(row[token.token_id].item())
        values, ids = row.topk(len(token.top))
        assert [token_id for token_id, _ in token.top] == ids.tolist()
        assert [value for _, value in token.top] == pytest.approx(values.tolist())


def test_seeded_answers_do_not_depend_on_the_batch(llama: Path) -> None:
    engine, sampling = (
        make_engine(llama),
        SamplingParams(15, temperature=1.2, top_p=0.9, repetition_penalty=1.1, seed=4),
    )
    alone = generate(engine, prompt_of(6), sampling)
    for n, params in enumerate((greedy(10), replace(sampling, seed=5), replace(sampling, top_k=3))):
        engine.add(Request(str(n), prompt_of(6), params))
    engine.step()
    engine.add(Request("r", prompt_of(6), sampling))
    outputs = run(engine)
    assert tokens(outputs["r"]) == alone
    assert tokens(outputs["1"]) != alone


def test_a_retry_elsewhere_gives_the_same_answer(llama: Path) -> None:
    sampling = SamplingParams(12, temperature=1.2, seed=4)
    whole = generate(make_engine(llama), prompt_of(6), sampling)
    assert generate(make_engine(llama, max_num_batched_tokens=5), prompt_of(6), sampling) == whole
    assert len(set(whole)) > 3


def test_min_tokens_ends_with_the_last_of_them(choose: Choose) -> None:
    logits = logits_of(50)
    done = sequence(greedy(20, min_tokens=len(OUTPUT), stop_token_ids=frozenset(range(25))))
    short = sequence(greedy(20, min_tokens=len(OUTPUT) + 1, stop_token_ids=frozenset(range(25))))
    drawn = [token.token_id for token in sample(logits, [done] * 49 + [short], choose)]
    assert drawn[:49] == logits[:49].argmax(-1).tolist()
    assert drawn[49] == 25 + logits[49, 25:].argmax()


def test_min_tokens_holds_back_the_stop_token(llama: Path) -> None:
    engine, prompt = make_engine(llama), prompt_of(8)
    first = generate(engine, prompt, greedy(1))[0]
    engine.add(Request("r", prompt, greedy(9, min_tokens=4, stop_token_ids=frozenset({first}), logprobs=0)))
    answer = sampled(run(engine)["r"])
    assert first not in [token.token_id for token in answer[:4]]
    assert len(answer) >= 4


@pytest.mark.parametrize("vocab", [64, 1000, 32_001])
def test_the_kernels_choose_as_torch_does(library: ctypes.CDLL, vocab: int) -> None:
    """Rows peaked and flat, with ties and masked tokens, under every filter."""
    chance = torch.Generator().manual_seed(vocab)
    logits = torch.randn(60, vocab, generator=chance) * torch.linspace(0.05, 9, 60)[:, None]
    logits[::3] = logits[::3].round()
    logits[::4, ::2] = -math.inf
    choose = CpuChoose(library, lambda: 3)
    masks = np.random.default_rng(vocab).integers(-(2**31), 2**31, (60, -(-vocab // 32)), dtype=np.int32)
    masks[:5] = 1 << 7
    for kind in (*FILTERS, {"top_p": 0.95}, {"top_k": 40, "top_p": 0.5}, {"top_k": 2**40}, {"temperature": 1e300}):
        rows = [sequence(SamplingParams(20, **{"seed": n, **kind})) for n in range(60)]
        assert choose(logits, rows) == torch_choose(logits, rows)
        expected = torch_choose(logits, rows, masks)
        assert choose(logits.clone(), rows, masks) == expected
        assert [token for token in expected[:5] if token % 32 == 7] == [token for token in expected[:5] if token >= 0]


def test_a_row_without_a_finite_best_fails_alone(choose: Choose) -> None:
    logits = logits_of(6)
    logits[1, 3], logits[2, 7], logits[3] = math.nan, math.inf, -math.inf
    rows = [sequence(SamplingParams(20, temperature=n % 2)) for n in range(6)]
    found = sample(logits, rows, choose)
    assert [seq.error is None for seq in rows] == [True, False, False, False, True, True]
    assert [found[n].token_id for n in (0, 4)] == logits[[0, 4]].argmax(-1).tolist()


def test_no_draw_waits_for_the_device() -> None:
    kinds = [
        {"temperature": 0.0}, {"temperature": 0.8}, {"temperature": 1.0, "top_k": 5},
        {"temperature": 1.0, "top_p": 0.9}, {"temperature": 0.5, "min_p": 0.1},
        {"temperature": 0.5, "top_k": 900, "top_p": 0.5},
    ]  # fmt: skip
    seqs = [sequence(SamplingParams(max_tokens=4, **kind)) for kind in kinds]  # type: ignore[arg-type]
    logits = torch.randn(len(seqs), 700, generator=torch.Generator().manual_seed(1))
    with HostDevice() as device:
        found = chosen(DeviceTensor(logits), seqs)
        assert device.waits == []
        assert found.tolist() == chosen(logits, seqs).tolist()
