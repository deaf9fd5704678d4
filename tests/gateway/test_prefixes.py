"""A conversation's next turn costs what its new text costs, and its tokens are those of the whole text."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from services.gateway.text import CheckedIds, Tokenizer, TooManyTokens
from services.gateway.text.dividers import dividers_of
from services.gateway.text.prefixes import CACHE_BYTES, MOST_CUT, SPACING, PrefixCache
from services.gateway.text.tokenizer import LONG_TEXT
from tandem.vocabulary import load_tokenizer
from tests.gateway.tiny_model import EOS, byte_level_tokenizer, large_tokenizer

DEMO = Path(__file__).parents[2] / "models" / "demo" / "target"
CHAT = ("<|im_start|>", "<|im_end|>", "<think>", "</s>")
ODD_ADDED = (
    AddedToken("<l>", lstrip=True, normalized=False),
    AddedToken("{r}", rstrip=True, normalized=False),
    AddedToken("{w}", single_word=True, normalized=False),
    AddedToken("Nore", normalized=True),
    AddedToken("|>", normalized=False),
    AddedToken("<|im_", normalized=False),
    AddedToken("xx", normalized=False),
    AddedToken("<end><", normalized=False),
    AddedToken("<end>", normalized=False),
    AddedToken("  ", normalized=False),
    # Of all these, dividers are {r} and the following.
    AddedToken("[u]", normalized=False),
    AddedToken("{l}", lstrip=True, normalized=False),
)
WORDS = (
    " ", "  ", "\n", "\n\n", "\t", "a", "b c", "É", "e\u0301", "\u0301", "ﬁ", "＜s>", "▁", "ß", "İ", "12", "345", "_",
    "\u200d", "👩\u200d👧", "狐", "x" * 40, " " * 30, "def ", "import os", "<", "|", ">", "<|", "|>", "<|im_",
    "im_end|>", "the quick", "nore", "\0", "\ufeff", "\u2028",
)  # fmt: skip
Encode = Callable[[str], list[int]]


def chatting(tokenizer: tokenizers.Tokenizer, *odd: AddedToken) -> tokenizers.Tokenizer:
    tokenizer.add_special_tokens(list(CHAT))
    tokenizer.add_tokens(list(odd))
    return tokenizer


def pieces_model(scheme: str) -> tokenizers.Tokenizer:
    """As SentencePiece makes them; a stretch that begins a text may have a space put before it."""
    known = ["<unk>", *"▁abcdefimnoqrstuxkEe<|>_/1234", "▁a", "▁the", "qu", "▁▁", "xx", "im_", "end", "e\u0301"]
    made = tokenizers.Tokenizer(models.Unigram([(word, -float(len(word) % 3)) for word in known], 0, True))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    return made


def llama_style() -> tokenizers.Tokenizer:
    known = ["<unk>", "<s>", *(f"<0x{i:02X}>" for i in range(256)), *"▁abcequithn<|>", "th", "the", "▁the"]
    merges = [("t", "h"), ("th", "e"), ("▁", "the")]
    vocabulary = {word: i for i, word in enumerate(known)}
    made = tokenizers.Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    template = processors.TemplateProcessing("<s> $A", "<s> $A $B", [("<s>", 1)])
    made.post_processor = processors.Sequence([processors.ByteLevel(), template])
    return made


def word_pieces() -> tokenizers.Tokenizer:
    known = ["[UNK]", "[CLS]", "[SEP]", *"abcdefimnoqrstux<|>_/12", "the", "quick", "##x", "##m", "##e", "ss"]
    made = tokenizers.Tokenizer(models.WordPiece({word: i for i, word in enumerate(known)}, unk_token="[UNK]"))
    made.normalizer, made.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    made.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    return made


def normalizing(*steps: Any) -> tokenizers.Tokenizer:
    made = byte_level_tokenizer()
    made.normalizer = normalizers.Sequence(list(steps))
    return made


def prefixing() -> tokenizers.Tokenizer:
    made = byte_level_tokenizer()
    made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel()])
    made.post_processor = processors.RobertaProcessing(("</s>", 1), ("<s>", 2))
    return made


TOKENIZERS = {
    "demo": load_tokenizer(DEMO),
    "demo, chatting": chatting(load_tokenizer(DEMO)),
    "demo, odd": chatting(load_tokenizer(DEMO), *ODD_ADDED),
    "draft": chatting(load_tokenizer(DEMO.parent / "draft")),
    "tiny": byte_level_tokenizer(),
    "tiny, odd": chatting(byte_level_tokenizer(), *ODD_ADDED),
    "large": chatting(large_tokenizer(2000)),
    "prefixing": chatting(prefixing(), *ODD_ADDED),
    "normalizing": chatting(normalizing(normalizers.NFKC(), normalizers.Strip(), normalizers.Lowercase()), *ODD_ADDED),
    "composing": chatting(normalizing(normalizers.NFC(), normalizers.Replace("<", "a")), *ODD_ADDED),
    "llama": chatting(llama_style(), *ODD_ADDED),
    "word pieces": chatting(word_pieces(), *ODD_ADDED),
    **{f"Metaspace, {scheme}": chatting(pieces_model(scheme), *ODD_ADDED) for scheme in ("first", "always", "never")},
}


def whole(tokenizer: tokenizers.Tokenizer, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def through(cache: PrefixCache, tokenizer: tokenizers.Tokenizer, salt: str, text: str) -> tuple[list[int], int]:
    """Returns the ids, and how many characters had to be tokenized."""
    rest = cache.find(salt, text)
    found = tokenizer.encode_batch_fast(list(rest.pieces), add_special_tokens=False)
    ids = rest.join([CheckedIds("I", encoding.ids) for encoding in found])
    assert rest.num_tokens([len(encoding) for encoding in found]) == len(ids)
    cache.keep(rest)
    return list(ids), len(rest)


def parts_of_tokens(tokenizer: tokenizers.Tokenizer) -> list[str]:
    contents = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
    return [*contents, *contents, *(text[:-1] for text in contents), *(text[1:] for text in contents)]


@st.composite
def conversations(draw: st.DrawFn, texts: Sequence[str]) -> list[tuple[str, str]]:
    """Salts and texts, of which most begin as an earlier one does, up to anywhere in it."""
    words = st.lists(st.sampled_from(texts), max_size=30).map("".join)
    said = [("", "")]
    for _ in range(draw(st.integers(1, 8))):
        salt, before = draw(st.sampled_from(said))
        end = draw(st.sampled_from((len(before), len(before), len(before), len(before) // 2, max(len(before) - 3, 0))))
        said.append((draw(st.sampled_from((salt, "", "other"))), before[:end] + draw(words)))
    return said


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
def test_tokens_are_those_of_the_whole_text(name: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]
    dividers = dividers_of(tokenizer)
    assert dividers
    spacing, most = data.draw(st.sampled_from((1, 7, 40))), data.draw(st.sampled_from((2000, 20_000, CACHE_BYTES)))
    cache = PrefixCache(dividers, most, spacing)
    for salt, text in data.draw(conversations([*WORDS, *dividers, *parts_of_tokens(tokenizer)])):
        assert through(cache, tokenizer, salt, text)[0] == whole(tokenizer, text)
        assert cache.num_bytes <= most
        assert cache.num_bytes == sum(stretch.num_bytes for stretch in cache._stretches.values())


@pytest.mark.parametrize("name", TOKENIZERS)
def test_dividers_are_found_wherever_they_are(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    around = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
    around += [text[:end] for text in around for end in range(1, len(text))]
    for divider in dividers_of(tokenizer):
        token_id = tokenizer.token_to_id(divider)
        for before in around:
            assert token_id in whole(tokenizer, before + divider + before[::-1]), before


@pytest.mark.parametrize(
    ("contents", "dividers"),
    [
        (("<a>", "<b>"), ["<a>", "<b>"]),
        (("<a>", "<a>\n"), ["<a>\n"]),  # the longer one may take its place
        (("<a>", "x<a>"), ["x<a>"]),
        (("<a>", "x<"), ["x<"]),
        (("aa", "b"), ["b"]),  # found at the first of three
        (("abca", "d"), ["d"]),
    ],
)
def test_a_token_that_another_may_overlap_divides_nothing(contents: Sequence[str], dividers: Sequence[str]) -> None:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.add_special_tokens(list(contents))
    assert dividers_of(tokenizer) == dividers


def unknown_kind(tokenizer: tokenizers.Tokenizer) -> None:
    class Own:
        def pre_tokenize(self, text: Any) -> None:
            """Does nothing."""

    tokenizer.pre_tokenizer = pre_tokenizers.PreTokenizer.custom(Own())


def drawn_by_lot(tokenizer: tokenizers.Tokenizer) -> None:
    tokenizer.model = models.BPE(dropout=0.1)


def twice(tokenizer: tokenizers.Tokenizer) -> None:
    template = processors.TemplateProcessing("$A $A", "$A $B", [])
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(), template])


def as_text(tokenizer: tokenizers.Tokenizer) -> None:
    tokenizer.encode_special_tokens = True


@pytest.mark.parametrize("change", [unknown_kind, drawn_by_lot, twice, as_text, lambda one: one.enable_truncation(100)])
def test_what_is_not_known_to_allow_it_has_no_dividers(change: Callable[[tokenizers.Tokenizer], None]) -> None:
    tokenizer = chatting(byte_level_tokenizer())
    assert dividers_of(tokenizer) == sorted([*CHAT, EOS])
    change(tokenizer)
    assert dividers_of(tokenizer) == []


def talk(random: Random, characters: int) -> str:
    said = "<|im_start|>user\n"
    while len(said) < characters:
        said += random.choice(("the ", "quick ", "fox ", "<|im_end|>\n<|im_start|>assistant\n", "x" * 10))
    return said + "<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("characters", [LONG_TEXT, 5 * SPACING, MOST_CUT // 2])
async def test_a_turn_tokenizes_its_new_text_alone(characters: int) -> None:
    seen = list[str]()

    class Seeing:
        """Notes what is encoded."""

        def __getattr__(self, name: str) -> Any:
            return getattr(library, name)

        def encode_batch_fast(self, texts: list[str], add_special_tokens: bool) -> Any:
            seen.extend(texts)
            return library.encode_batch_fast(texts, add_special_tokens=add_special_tokens)

    library, random = chatting(byte_level_tokenizer()), Random(1)
    tokenizer: Any = Tokenizer(Seeing())  # type: ignore[arg-type]
    text = talk(random, characters)
    ids = await tokenizer.encode_chat(text, "a")
    assert list(ids) == whole(library, text)
    for turn in range(3):
        seen.clear()
        new = f"an answer\n<|im_end|>\n<|im_start|>user\nand {turn}<|im_end|>\n<|im_start|>assistant\n"
        text += new
        assert list(await tokenizer.encode_chat(text, "a")) == whole(library, text)
        # Beside the new text: what came after the last divider, and the divider before each piece.
        assert sum(map(len, seen)) <= len(new) + len("assistant\n") + len(seen) * len("<|im_start|>")
    seen.clear()
    assert list(await tokenizer.encode_chat(text, "b")) == whole(library, text)
    assert sum(map(len, seen)) >= len(text), "another tenant's text was found"
    assert isinstance(await tokenizer.encode_chat(text, "a"), CheckedIds)


def test_conversations_that_share_a_beginning_share_its_ids() -> None:
    tokenizer, cache = TOKENIZERS["demo, chatting"], PrefixCache(list(CHAT))
    system = talk(Random(0), 20 * SPACING)
    through(cache, tokenizer, "", system)
    for question in range(50):
        text = f"{system}{question}<|im_end|>{talk(Random(question), SPACING)}"
        ids, characters = through(cache, tokenizer, "", text)
        assert ids == whole(tokenizer, text)
        assert characters < 4 * SPACING
    _, characters = through(cache, tokenizer, "", system[:-1000])
    assert characters < 2 * SPACING


def test_memory_is_bounded_whatever_is_sent() -> None:
    """Many short stretches, and few long ones."""
    tokenizer, most = TOKENIZERS["demo, chatting"], 2**20
    texts = [("<|im_end|>" * 3 + f"{i}") * 2000 for i in range(20)] + ["狐" * 200_000 + f"</s>{i}" for i in range(5)]
    cache = PrefixCache(list(CHAT), most, spacing=20)
    through(cache, tokenizer, "", texts[0])
    tracemalloc.start()
    try:
        for text in texts:
            through(cache, tokenizer, "", text)
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert cache.num_bytes <= most
    assert held < 1.5 * most


@pytest.mark.parametrize("warm", [False, True])
async def test_a_text_of_too_many_tokens_is_refused_as_ever(warm: bool) -> None:
    library = chatting(byte_level_tokenizer())
    text = talk(Random(3), 3 * SPACING)
    most = len(whole(library, text)) + 10
    tokenizer = Tokenizer(library, most=most)
    if warm:
        await tokenizer.encode_chat(text, "")
    longer = text + "one more " * 20
    for _ in range(2):
        with pytest.raises(TooManyTokens) as error:
            await tokenizer.encode_chat(longer, "")
        with pytest.raises(TooManyTokens) as expected:
            await tokenizer.encode(longer, add_special_tokens=False)
        assert str(error.value) == str(expected.value)
    assert list(await tokenizer.encode_chat(text, "")) == whole(library, text)


async def test_what_is_no_text_fails_as_ever() -> None:
    tokenizer = Tokenizer(chatting(byte_level_tokenizer()))
    text = talk(Random(4), 2 * SPACING) + "\ud800" + talk(Random(4), 2 * SPACING)
    with pytest.raises(Exception) as expected:  # noqa: PT011
        await tokenizer.encode(text, add_special_tokens=False)
    for _ in range(2):
        with pytest.raises(expected.type):
            await tokenizer.encode_chat(text, "")


async def test_without_dividers_a_text_is_tokenized_whole() -> None:
    library = tokenizers.Tokenizer(models.WordLevel({"a": 0, "u": 1}, unk_token="u"))
    library.pre_tokenizer, library.decoder = pre_tokenizers.Whitespace(), decoders.ByteLevel()
    tokenizer = Tokenizer(library)
    assert list(await tokenizer.encode_chat("a b " * LONG_TEXT, "")) == [0, 1] * LONG_TEXT
