"""Tokenizers whose patterns are known are read on the event loop; those of others, which may not end, beside it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from services.gateway.text.patterns import KNOWN, has_known_patterns
from tandem.checkpoints.gguf.tokenizer import _CUTS

# Texts over which patterns of words and spaces may search for long.
ROWS = ("a", " ", "\n", "1", "!", "é", "狐", "a ", " \n", "\r\n ", "'s", "A1!", "aA")


def with_pattern(regex: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(regex), "isolated")
    return tokenizer


def test_those_of_the_demo_and_of_gguf_files_are_known(demo_model: Path) -> None:
    assert has_known_patterns(Tokenizer.from_file(str(demo_model / "tokenizer.json")))
    assert {cut for cut in _CUTS.values() if cut not in ("", "digits")} <= KNOWN


def test_others_are_not(demo_model: Path) -> None:
    assert not has_known_patterns(with_pattern("(a+)+$"))
    tokenizer = Tokenizer.from_file(str(demo_model / "tokenizer.json"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Replace(Regex("(a+)+$"), "b")])
    assert not has_known_patterns(tokenizer)
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    assert has_known_patterns(tokenizer)


@pytest.mark.parametrize("regex", sorted(KNOWN))
def test_a_known_pattern_takes_long_over_no_text(regex: str) -> None:
    """Ten times as much text takes no hundred times as long, in processor time of this thread."""
    tokenizer = with_pattern(regex)
    for row in ROWS:
        seconds = []
        for length in (2_000, 20_000):
            text = (row * length)[:length]
            began = time.thread_time()
            tokenizer.encode_batch_fast([text])
            seconds.append(time.thread_time() - began)
        assert seconds[1] < max(0.05, 40 * seconds[0]), (row, seconds)
