"""Words of GGUF files: what each kind of token says, and what it does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from tandem.checkpoints.gguf.metadata import Metadata
from tandem.checkpoints.gguf.tokenizer import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED, tokenizer_of
from tandem.vocabulary import BYTE_OF, Vocabulary

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = {
    "<unk>": UNKNOWN, "<s>": CONTROL, **dict.fromkeys(BYTES, BYTE), "▁": NORMAL, "a": NORMAL, "▁a": NORMAL,
    "</s>": CONTROL, "<tool>": USER_DEFINED, "  ": USER_DEFINED, "[PAD9]": UNUSED, "b": NORMAL,
}  # fmt: skip


def spaced(**says: Any) -> Tokenizer:
    values = {
        "tokens": list(WORDS), "token_type": list(WORDS.values()), "scores": [0.0] * len(WORDS), "model": "llama",
        "bos_token_id": 1, "eos_token_id": 261, "unknown_token_id": 0, **says,
    }  # fmt: skip
    return tokenizer_of(
        Metadata(Path("m.gguf"), {f"tokenizer.ggml.{key}": said for key, said in values.items()}, frozenset())
    )


def test_each_kind_of_token_says_its_own() -> None:
    made = Tokenizer.from_str(spaced().to_str())
    vocabulary = Vocabulary(made)
    said = {word: vocabulary.token_bytes(i) for i, word in enumerate(WORDS)}
    assert [said[word] for word in BYTES] == [bytes([byte]) for byte in range(256)]
    others = {word: data.decode() for word, data in said.items() if word not in BYTES}
    assert others == {
        "<unk>": "<unk>", "<s>": "<s>", "▁": " ", "a": "a", "▁a": " a", "</s>": "</s>", "<tool>": "<tool>",
        "  ": "  ", "[PAD9]": "", "b": "b",
    }  # fmt: skip
    assert vocabulary.special == {0, 1, 261}


@pytest.mark.parametrize("prefix", [True, False])
def test_a_space_is_put_before_a_text_where_the_file_wants_one(prefix: bool) -> None:
    made = spaced(add_space_prefix=prefix)
    assert made.encode("a b").tokens == ["<s>", "▁a" if prefix else "a", "▁", "b"]
    for text in ("a b", " a", "  a", "a<tool>b", "a é", "[PAD9]"):
        ids = made.encode(text, add_special_tokens=False).ids
        assert made.decode(ids) == (text if not (prefix and "<tool>" in text) else "a<tool> b")
        spelled = Vocabulary(made).spell(text)
        assert b"".join(map(Vocabulary(made).token_bytes, spelled)) == text.encode()
    assert Vocabulary(made).spell("a") == [made.token_to_id("a")]


def test_an_unused_id_has_no_word() -> None:
    words = ["<|end|>", *BYTE_OF, "[PAD257]", "[PAD258]"]
    values = {"model": "gpt2", "tokens": words, "merges": [], "token_type": [3, *[1] * 256, 5, 5]}
    made = tokenizer_of(
        Metadata(Path("m.gguf"), {f"tokenizer.ggml.{key}": said for key, said in values.items()}, frozenset())
    )
    vocabulary = Vocabulary(made)
    assert vocabulary.token_bytes(257) == vocabulary.token_bytes(258) == b""
    assert made.decode(made.encode("[PAD257]").ids) == "[PAD257]"
