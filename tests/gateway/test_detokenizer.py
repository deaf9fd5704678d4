"""Pieces of text: whole characters only, and together what decoding at once gives."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as HfTokenizer
from tokenizers import decoders, models

from services.gateway.text import Tokenizer
from tests.gateway.tiny_model import EOS, byte_level_tokenizer
from tests.vocabularies import NAMES, PADDING, tokenizer_of

pytestmark = pytest.mark.fast

HF = byte_level_tokenizer()
BYTE_LEVEL = Tokenizer(HF)
CHARACTERS = st.one_of(st.characters(codec="utf-8", exclude_characters="<"), st.sampled_from("狐🦊👩‍👩‍👧é\u200d\ufffd"))
TEXTS = st.text(CHARACTERS, max_size=60)  # none is a special token's


def pieces(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    detokenizer = tokenizer.detokenizer()
    return [*(detokenizer.feed(i) for i in ids), detokenizer.flush()]


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


KNOWN = {name: tokenizer_of(name) for name in NAMES}
OURS = {name: Tokenizer(known) for name, known in KNOWN.items()}
SP, SPACED = KNOWN["spaced"], OURS["spaced"]


@pytest.mark.parametrize("name", NAMES)
@given(st.data())
def test_a_whole_text_is_as_the_library_has_it(name: str, data: st.DataObject) -> None:
    """An answer has the space, too, that the library leaves out of a text's beginning."""
    known, tokenizer = KNOWN[name], OURS[name]
    any_ids = st.lists(st.integers(0, tokenizer.vocab_size + PADDING), max_size=12)
    ids = data.draw(any_ids) + known.encode(data.draw(TEXTS)).ids + data.draw(any_ids)
    special = {i for i, token in known.get_added_tokens_decoder().items() if token.special}
    shown = b"".join(tokenizer.token_bytes(i) for i in ids if i not in special)
    text, whole = shown.decode(errors="replace"), known.decode(ids)
    assert "".join(pieces(tokenizer, ids)) == text
    if text.encode() == shown:
        assert "".join(tokenizer.pieces(ids)) == whole
        assert text == (" " if name == "spaced" and text.startswith(" ") else "") + whole


@given(TEXTS, TEXTS)
def test_an_answer_continues_its_prompt(prompt: str, answer: str) -> None:
    """SentencePiece's words have their spaces in front."""
    ids = SP.encode(f"x{prompt} {answer}").ids
    for cut in range(2, len(ids)):
        behind = "".join(SPACED.pieces(ids[:cut])) + "".join(pieces(SPACED, ids[cut:]))
        if "\ufffd" not in behind:
            assert behind == f"x{prompt} {answer}"


def test_bytes_that_are_no_characters_spoil_no_others() -> None:
    """The library makes four replacement characters of these."""
    ids = [SP.token_to_id(f"<0x{byte:02X}>") for byte in [*"é".encode(), 0xFF, 0xE2]]
    assert "".join(pieces(SPACED, ids)) == "é\ufffd\ufffd"
    assert SP.decode(ids) == "\ufffd" * 4


@pytest.mark.parametrize("text", ["🦊", "狐", "é"])
def test_bytes_wait_for_the_last_of_a_character(text: str) -> None:
    ids = [SP.token_to_id(f"<0x{byte:02X}>") for byte in text.encode()]
    assert pieces(SPACED, ids) == [*[""] * (len(ids) - 1), text, ""]


@pytest.mark.parametrize(
    ("ids", "expected"), [("▁ ▁the", ["", " the"]), ("▁the ▁", ["the", " "]), ("<0x20> a", ["", "a"])]
)
def test_a_text_begins_without_one_space(ids: str, expected: list[str]) -> None:
    found = [SP.token_to_id(token) for token in ids.split(" ")]
    assert list(SPACED.pieces(found)) == expected


def test_metaspace_begins_without_any() -> None:
    known = HfTokenizer(models.WordLevel({"▁▁the": 0, "▁fox": 1, "x": 2}, unk_token="x"))
    known.decoder = decoders.Metaspace()
    tokenizer = Tokenizer(known)
    for ids in ([0, 1], [1, 0], [2, 0], [10**6, 0]):
        assert "".join(tokenizer.pieces(ids)) == known.decode(ids)
    assert pieces(tokenizer, [0, 1]) == ["  the", " fox", ""]
