"""Sampling parameters: one dataclass, of one mind with the proto, and what each of its fields allows."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from tandem.sampling import NAMES, RANGES, InvalidParameter, SamplingParams, given_in
from tandem.v1 import llm_pb2

pytestmark = pytest.mark.fast

# Every field with a value that is not its default, exact in float32.
FULL = SamplingParams(
    max_tokens=7, min_tokens=2, temperature=0.5, top_k=3, top_p=0.75, min_p=0.125, repetition_penalty=1.5,
    presence_penalty=-0.5, frequency_penalty=0.25, logit_bias={5: -2.0, 9: 1.5}, stop=("b", "a"),
    stop_token_ids=frozenset({4, 2}), logprobs=0, seed=2**64 - 1, ignore_eos=True,
    include_stop_str_in_output=True, skip_special_tokens=False, allowed_token_ids=frozenset({8, 1}),
    bad_words=("y", "x"), bad_words_token_ids=((3, 1), (2,)), grammar="g",
    prompt_logprobs=1, logprob_token_ids=(6, 7),
    thinking_token_budget=0, thinking_begin_token_ids=(11,), thinking_end_token_ids=(13, 12),
)  # fmt: skip


def test_the_proto_has_the_same_fields() -> None:
    assert [field.name for field in llm_pb2.SamplingParams.DESCRIPTOR.fields] == sorted(
        NAMES, key=lambda name: llm_pb2.SamplingParams.DESCRIPTOR.fields_by_name[name].number
    )


def test_nothing_is_lost_on_the_wire() -> None:
    assert not [field.name for field in dataclasses.fields(FULL) if getattr(FULL, field.name) == default(field)]
    for sampling in (FULL, SamplingParams()):
        message = llm_pb2.SamplingParams()
        sampling.to_proto(message)
        assert SamplingParams.from_proto(llm_pb2.SamplingParams.FromString(message.SerializeToString())) == sampling


def default(field: dataclasses.Field[Any]) -> Any:
    return getattr(SamplingParams(), field.name)


def test_only_what_is_set_was_given() -> None:
    assert given_in(llm_pb2.SamplingParams()) == {}
    assert given_in(llm_pb2.SamplingParams(temperature=0.0, seed=0)) == {"temperature": 0.0, "seed": 0}


def test_other_words_for_the_same() -> None:
    assert SamplingParams.of({"top_k": -1}).top_k == 0
    assert SamplingParams.of({"seed": -1}).seed == 2**64 - 1
    for least in (0.0, -0.0, 0, 5e-324):  # the last is 0 as a number of 32 bits
        greedy = SamplingParams.of({"top_p": least, "temperature": 1.5})
        assert (greedy.temperature, greedy.top_p) == (0.0, least)
        greedy.check()
    assert SamplingParams.of({"top_p": 1e-30}).temperature == 1.0


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 2**31}, "max_tokens"),
        ({"max_tokens": 3, "min_tokens": 4}, "min_tokens"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"top_k": -2}, "top_k"),
        ({"top_p": -0.1}, "top_p"),
        ({"top_p": 0.0, "temperature": 2.1}, "temperature"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"presence_penalty": math.inf}, "presence_penalty"),
        ({"logit_bias": {1: math.nan}}, "logit_bias"),
        ({"logit_bias": {1: 101.0}}, "logit_bias"),
        ({"logit_bias": dict.fromkeys(range(20000), 1.0)}, "logit_bias"),
        ({"stop": ("",)}, "stop"),
        ({"stop": ("x",) * 17}, "stop"),
        ({"logprobs": 21}, "logprobs"),
        ({"seed": 2**64}, "seed"),
        ({"bad_words": ("",)}, "bad_words"),
    ],
)
def test_values_out_of_range(given: dict[str, Any], name: str) -> None:
    with pytest.raises(InvalidParameter) as error:
        SamplingParams.of(given)
    assert error.value.name == name
    assert str(error.value).startswith(f"{name} ")


@pytest.mark.parametrize(
    "given",
    [
        {"logit_bias": {20: 1.0}},
        {"logit_bias": {-1: 1.0}},
        {"logprobs": 20},
        {"allowed_token_ids": frozenset({19})},
        {"bad_words_token_ids": ((1, 19),)},
    ],
)
def test_tokens_that_the_model_lacks(given: dict[str, Any]) -> None:
    sampling = SamplingParams.of(given)
    sampling.check_vocabulary(1000) if -1 not in sampling.logit_bias else None
    with pytest.raises(InvalidParameter):
        sampling.check_vocabulary(19)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"logprobs": -1}, "logprobs must be between 0 and 20, got -1"),
        ({"prompt_logprobs": -1}, "prompt_logprobs must be between 0 and 20, got -1"),
        ({"prompt_logprobs": 10**20}, f"prompt_logprobs must be between 0 and 20, got {10**20}"),
    ],
)
def test_a_refusal_says_what_would_be_right(given: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidParameter) as refused:
        SamplingParams.of(given)
    assert str(refused.value) == problem


@pytest.mark.parametrize("name", RANGES)
def test_what_is_taken_is_taken_from_the_wire(name: str) -> None:
    """Also at the bounds, which need not be numbers of 32 bits."""
    for bound in RANGES[name]:
        try:
            taken = SamplingParams.of({name: bound})
        except InvalidParameter:
            continue
        message = llm_pb2.SamplingParams()
        taken.to_proto(message)
        SamplingParams.from_proto(message).check()
