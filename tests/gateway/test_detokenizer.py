"""Pieces of text: whole characters only, and together what decoding at once gives."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as HfTokenizer
from tokenizers import decoders, models

from services.gateway.text import ByteDetokenizer, Tokenizer, WindowDetokenizer
from tests.gateway.tiny_model import EOS, byte_level_tokenizer

pytestmark = pytest.mark.fast

HF = byte_level_tokenizer()
BYTE_LEVEL = Tokenizer(HF)
TEXTS = st.text(st.one_of(st.characters(codec="utf-8"), st.sampled_from("狐🦊👩‍👩‍👧é\u200d\ufffd")), max_size=60)


def pieces(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    detokenizer = tokenizer.detokenizer()
    return [*(detokenizer.feed(i) for i in ids), detokenizer.flush()]


def test_byte_level_tokenizers_take_the_exact_way() -> None:
    assert isinstance(BYTE_LEVEL.detokenizer(), ByteDetokenizer)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, HF.get_vocab_size() - 1), max_size=80))
def test_any_tokens_equal_decoding_at_once(ids: list[int]) -> None:
    """Random tokens are mostly broken UTF-8: the replacement characters must be the same, too."""
    assert "".join(pieces(BYTE_LEVEL, ids)) == HF.decode(ids, skip_special_tokens=True)


@settings(max_examples=300, deadline=None)
@given(TEXTS)
def test_no_part_of_a_character_is_shown(text: str) -> None:
    ids = HF.encode(text).ids
    shown = ""
    for piece in pieces(BYTE_LEVEL, ids):
        shown += piece
        assert text.startswith(shown)
    assert shown == text


def test_a_character_comes_with_its_last_byte() -> None:
    ids = HF.encode("🦊").ids
    assert len(ids) > 1, "the tokenizer of this test must split the fox"
    assert pieces(BYTE_LEVEL, ids) == [*[""] * (len(ids) - 1), "🦊", ""]


def test_an_unfinished_character_ends_as_a_replacement() -> None:
    ids = HF.encode("ok 🦊").ids[:-1]
    assert "".join(pieces(BYTE_LEVEL, ids)) == HF.decode(ids) == "ok \ufffd"


def test_special_tokens_say_nothing_as_text_and_themselves_as_tokens() -> None:
    end = HF.encode(EOS).ids[0]
    assert pieces(BYTE_LEVEL, [end]) == ["", ""]
    assert BYTE_LEVEL.token_bytes(end) == EOS.encode()


def test_unknown_ids_say_nothing() -> None:
    assert pieces(BYTE_LEVEL, [10**6]) == ["", ""]


def test_the_cost_of_a_token_does_not_grow() -> None:
    detokenizer = BYTE_LEVEL.detokenizer()
    ids = HF.encode("the quick brown 🦊 ").ids * 4000

    def seconds(part: list[int]) -> float:
        start = time.thread_time()
        for i in part:
            detokenizer.feed(i)
        return time.thread_time() - start

    tenth = len(ids) // 10
    seconds(ids[:tenth])
    early = min(seconds(ids[:tenth]) for _ in range(3))
    seconds(ids)
    late = min(seconds(ids[:tenth]) for _ in range(3))
    assert late < 5 * early + 0.01


def sentencepiece_like() -> HfTokenizer:
    """Byte fallback, a leading space that is stripped: a token's text depends on its neighbours."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {
        "▁the": 256,
        "▁fox": 257,
        "es": 258,
        "▁": 259,
        "狐": 260,
    }
    tokenizer = HfTokenizer(models.BPE(vocab, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


SP = sentencepiece_like()


@settings(max_examples=200, deadline=None)
@given(st.lists(st.one_of(st.sampled_from([256, 257, 258, 259, 260]), TEXTS.filter(bool)), max_size=12))
def test_other_tokenizers_give_the_same_text(parts: list[int | str]) -> None:
    ids: list[int] = []
    for part in parts:
        ids += [part] if isinstance(part, int) else list(part.replace("\ufffd", "?").encode())
    tokenizer = Tokenizer(SP)
    assert isinstance(tokenizer.detokenizer(), WindowDetokenizer)
    assert "".join(pieces(tokenizer, ids)) == SP.decode(ids)


@pytest.mark.parametrize("text", ["🦊", "狐", "é"])
def test_other_tokenizers_show_whole_characters(text: str) -> None:
    data = list(text.encode())
    assert pieces(Tokenizer(SP), data) == [*[""] * (len(data) - 1), text, ""]
