"""An alias gives each user one of its models: by the weights, the same one each time, and never one that is gone."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.aliases import Alias
from tests.fuzzing import fuzzed

USERS = [f"user {i}" for i in range(20_000)]


def everything(name: str) -> bool:
    return True


@pytest.mark.parametrize(
    ("text", "weights", "fallbacks"),
    [
        ("fast=smollm2:0.9,smollm2-int4:0.1", {"smollm2": 0.9, "smollm2-int4": 0.1}, []),
        ("fast=a:3,b,c:fallback,d:fallback", {"a": 3.0, "b": 1.0}, ["c", "d"]),
        ("a=a", {"a": 1.0}, []),
        ("q=org/name-GGUF:Q8_0,org/name-GGUF:Q8_0:2", None, None),
        ("q=org/name-GGUF:Q8_0,b:2", {"org/name-GGUF:Q8_0": 1.0, "b": 2.0}, []),
        ("q=org/name-GGUF:Q8_0:fallback,b", {"b": 1.0}, ["org/name-GGUF:Q8_0"]),
    ],
)
def test_an_alias_is_what_it_says(text: str, weights: dict[str, float] | None, fallbacks: list[str] | None) -> None:
    if weights is None:
        with pytest.raises(ValueError, match="is there twice"):
            Alias.parse(text)
        return
    alias = Alias.parse(text)
    assert (alias.weights, alias.fallbacks) == (weights, fallbacks)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("fast", "is no name"),
        ("fast=", "is no name"),
        ("=a", "is no name"),
        ("fast=a,,b", "is no name"),
        ("fast=a b", "is no name"),
        ("fast=a\nb", "is no name"),
        ("f" * 257 + "=a", "is no name"),
        ("fast=a:fallback", "at least one of them with a weight"),
        ("fast=" + ",".join(f"m{i}" for i in range(17)), "1 to 16 models"),
        ("fast=a:0", "weight of a must be above 0"),
        ("fast=a:-1", "weight of a must be above 0"),
        ("fast=a:nan", "weight of a must be above 0"),
        ("fast=a:inf", "weight of a must be above 0"),
        ("fast=a:1e9", "weight of a must be above 0"),
    ],
)
def test_what_is_none_is_an_error_that_says_so(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Alias.parse(text)


@fuzzed(300)
@given(st.text(max_size=60))
def test_any_text_is_an_alias_or_an_error_of_one_short_line(text: str) -> None:
    said = ""
    try:
        alias = Alias.parse(text)
        assert alias.choose("someone", everything) in alias.weights
    except ValueError as error:
        said = str(error)
    assert len(said) < 400
    assert "\n" not in said


def test_each_model_has_its_part_of_the_users_who_keep_it() -> None:
    alias = Alias.parse("fast=a:0.7,b:0.2,c:0.1")
    chosen = {user: alias.choose(user, everything) for user in USERS}
    counts = Counter(chosen.values())
    for name, share in alias.shares.items():
        assert counts[name] / len(USERS) == pytest.approx(share, abs=0.015)
    assert chosen == {user: alias.choose(user, everything) for user in USERS}


def test_users_move_only_as_far_as_weights_do() -> None:
    before, after = Alias.parse("fast=a:0.9,b:0.1"), Alias.parse("fast=a:0.8,b:0.2")
    moves = Counter((before.choose(user, everything), after.choose(user, everything)) for user in USERS)
    assert moves["b", "a"] == 0
    assert 0.05 < moves["a", "b"] / len(USERS) < 0.15


def test_what_is_gone_answers_nobody_and_others_keep_theirs() -> None:
    alias = Alias.parse("fast=a:0.5,b:0.5,c:fallback,d:fallback")
    for user in USERS[:500]:
        assert alias.choose(user, {"a", "c"}.__contains__) == "a"
        assert alias.choose(user, {"c", "d"}.__contains__) == "c"
        assert alias.choose(user, {"d"}.__contains__) == "d"
        assert alias.choose(user, {"other"}.__contains__) is None
