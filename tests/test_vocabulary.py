"""Tokens as what they say within a text, texts as their tokens: for every kind of tokenizer, against the library."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from tandem.vocabulary import Vocabulary, parts_of
from tests.vocabularies import HOLE, NAMES, PADDING, TEXTS, tokenizer_of

pytestmark = pytest.mark.fast

KNOWN = {name: tokenizer_of(name) for name in NAMES}
WORDS = {"x": 0, "▁time": 1, "##ing": 2, "low</w>": 3, "<0xE2>": 4, "▁": 5, ".": 6, "▁▁": 7}
SPACE, STRIP = decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)
DECODERS = {
    "none": (None, {1: " ▁time", 4: " <0xE2>"}),
    "WordPiece": (decoders.WordPiece(), {0: " x", 2: "ing", 6: "."}),
    "BPEDecoder": (decoders.BPEDecoder(), {0: "x", 3: "low "}),
    "Metaspace": (decoders.Metaspace(), {1: " time", 4: "<0xE2>", 5: " ", 7: "  "}),
    "Metaspace that adds no space": (decoders.Metaspace(prepend_scheme="never"), {1: " time", 5: " "}),
    "as Gemma has it": (decoders.Sequence([SPACE, decoders.ByteFallback(), decoders.Fuse()]), {1: " time", 7: "  "}),
    "without bytes": (decoders.Sequence([SPACE, decoders.Fuse(), STRIP]), {1: " time", 4: "<0xE2>"}),
    "nested": (decoders.Sequence([decoders.Sequence([SPACE, decoders.Fuse()]), STRIP]), {1: " time"}),
    "one by one": (decoders.Sequence([SPACE, STRIP]), {1: "time", 7: " "}),
}  # fmt: skip


@pytest.mark.parametrize("kind", DECODERS)
def test_a_token_is_what_it_adds_to_a_text(kind: str) -> None:
    tokenizer = Tokenizer(models.WordLevel(WORDS, unk_token="x"))
    decoder, expected = DECODERS[kind]
    if decoder is not None:
        tokenizer.decoder = decoder
    vocabulary = Vocabulary(tokenizer)
    assert {i: vocabulary.token_bytes(i).decode() for i in expected} == expected


def test_bytes_are_bytes() -> None:
    for name, tokenizer in KNOWN.items():
        vocabulary = Vocabulary(tokenizer)
        found = {vocabulary.token_bytes(i) for i in range(tokenizer.get_vocab_size())}
        assert {bytes([byte]) for byte in range(256)} <= found, name
    assert Vocabulary(KNOWN["spaced"]).token_bytes(KNOWN["spaced"].token_to_id("<0xE2>")) == b"\xe2"


def test_an_id_without_a_token_is_no_text() -> None:
    for name, token_id in (("holed", HOLE), ("holed", 10**6), ("padded", 4096 + PADDING), ("spaced", 2**31)):
        assert Vocabulary(KNOWN[name]).token_bytes(token_id) == b""


@pytest.mark.parametrize("name", NAMES)
@given(st.data())
def test_tokens_together_are_what_the_library_decodes_behind_another(name: str, data: st.DataObject) -> None:
    tokenizer, vocabulary = KNOWN[name], Vocabulary(KNOWN[name])
    ids = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() + 9), max_size=40))
    said = b"".join(map(vocabulary.token_bytes, ids))
    begin = tokenizer.token_to_id("x")
    whole = tokenizer.decode([begin, *ids], skip_special_tokens=False)
    if name == "spaced":  # of bytes that are no UTF-8 the library makes other characters
        ids = [i for i in ids if not (tokenizer.id_to_token(i) or "").startswith("<0x")]
        said, whole = b"".join(map(vocabulary.token_bytes, ids)), tokenizer.decode([begin, *ids], False)
    assert "x" + said.decode(errors="replace") == whole


@pytest.mark.parametrize("name", NAMES)
@given(st.one_of(st.text(max_size=30), st.sampled_from(TEXTS)))
def test_a_text_is_spelled_as_it_is(name: str, text: str) -> None:
    """Whatever it looks like: no space is added, no character is another one, no special token is in it."""
    vocabulary = Vocabulary(KNOWN[name])
    ids = vocabulary.spell(text)
    assert b"".join(map(vocabulary.token_bytes, ids)) == text.encode()
    assert vocabulary.special.isdisjoint(ids)


def test_it_is_spelled_as_the_model_has_learned_it() -> None:
    for name in NAMES:
        tokenizer, vocabulary = KNOWN[name], Vocabulary(KNOWN[name])
        text = " this License and the terms of it"
        known = tokenizer.encode(text[1:] if name == "spaced" else text, add_special_tokens=False).ids
        assert vocabulary.spell(text) == known, name
    assert Vocabulary(KNOWN["holed"]).spell("<note>") == [KNOWN["holed"].token_to_id("<note>")]


def test_special_tokens_are_spelled_where_they_are_wanted() -> None:
    for name, mark in (("ours", "<|endoftext|>"), ("spaced", "</s>"), ("holed", "<|middle|>")):
        tokenizer, vocabulary = KNOWN[name], Vocabulary(KNOWN[name])
        text, special = f"the{mark} time", tokenizer.token_to_id(mark)
        found = vocabulary.spell(text, with_special=True)
        assert [i for i in found if i in vocabulary.special] == [special]
        assert b"".join(map(vocabulary.token_bytes, found)) == text.encode()
        assert vocabulary.spell(mark, with_special=True) == [special]
        assert special not in vocabulary.spell(text)


def test_what_changes_texts_changes_none() -> None:
    """A tokenizer may compose characters, lower letters, cut spaces away, and put one before the text."""
    tokenizer = KNOWN["ours"]
    other = Tokenizer.from_str(tokenizer.to_str())
    other.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase(), normalizers.Strip()])
    other.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    for text in (" The e\u0301nd ", "THE", "the"):
        assert other.decode(Vocabulary(other).spell(text)) == text
    assert Vocabulary(other).spell("the") == tokenizer.encode("the", add_special_tokens=False).ids


def test_what_the_vocabulary_lacks_is_not_spelled_by_half() -> None:
    tokenizer = Tokenizer(models.BPE({"<unk>": 0, "a": 1, "▁": 2, "▁a": 3}, [("▁", "a")], unk_token="<unk>"))
    tokenizer.normalizer, tokenizer.decoder = normalizers.Replace(" ", "▁"), decoders.Metaspace()
    vocabulary = Vocabulary(tokenizer)
    assert vocabulary.spell("a a") == [1, 3]
    assert vocabulary.spell("a🦜") == vocabulary.spell("") == []


def test_a_word_of_many_ids_is_always_spelled_by_the_same() -> None:
    """Workers that take an answer over must choose the token that the others would."""
    spaced = Vocabulary(KNOWN["spaced"])
    assert spaced.spell("▁ ") == [*spaced.spell("▁"), KNOWN["spaced"].token_to_id("▁")]


def test_parts_come_in_their_order() -> None:
    inner = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    found = [part["type"] for part in parts_of(decoders.Sequence([SPACE, inner, decoders.Strip(" ", 1, 0)]))]
    assert found == ["Replace", "ByteFallback", "Fuse", "Strip"]
    assert list(parts_of(None)) == []
