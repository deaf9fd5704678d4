"""Stop strings: the same answer however the text is cut, nothing of the stop shown, nothing held without need."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.text import StopStrings

pytestmark = pytest.mark.fast

LETTERS = st.text("abc", max_size=30)
STOPS = st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=4)


def run(stops: list[str], parts: list[str]) -> tuple[str, str | None]:
    watch = StopStrings(stops)
    shown = "".join(watch.feed(part) for part in parts)
    return shown + ("" if watch.matched else watch.flush()), watch.matched


def expected(stops: list[str], text: str) -> tuple[str, str | None]:
    """The stop that is complete first, of those the longest, found the slow way."""
    for end in range(len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            stop = max(ended, key=len)
            return text[: end - len(stop)], stop
    return text, None


@given(STOPS, LETTERS)
def test_letter_by_letter(stops: list[str], text: str) -> None:
    assert run(stops, list(text)) == expected(stops, text)


@given(STOPS, st.lists(st.text("abc", max_size=7), max_size=8))
def test_however_it_is_cut(stops: list[str], parts: list[str]) -> None:
    assert run(stops, parts) == expected(stops, "".join(parts))


@given(STOPS, LETTERS)
def test_nothing_is_held_that_cannot_begin_a_stop(stops: list[str], text: str) -> None:
    watch = StopStrings(stops)
    shown = ""
    for letter in text:
        shown += watch.feed(letter)
        if watch.matched:
            return
    held = text[len(shown) :]
    assert held == "" or any(stop.startswith(held) for stop in stops)
    longer = [text[i:] for i in range(len(shown))]
    assert not any(stop.startswith(end) for end in longer for stop in stops)


@pytest.mark.parametrize(
    ("parts", "shown"),
    [(["Hello wor", "ldly"], ["Hello ", "worldly"]), (["a\n", "\n", "x"], ["a", "", ""]), (["abc"], ["abc"])],
)
def test_examples(parts: list[str], shown: list[str]) -> None:
    watch = StopStrings(["world!", "\n\n"])
    assert [watch.feed(part) for part in parts] == shown


def test_no_stops_hold_nothing() -> None:
    watch = StopStrings([])
    assert watch.feed("abc") == "abc"
    assert watch.flush() == ""
