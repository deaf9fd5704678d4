"""Conversion of a GGUF file's vocabulary to a Hugging Face `tokenizer.json`.

tokenizer.ggml.model   gpt2    byte-level BPE; tokenizer.ggml.pre names the pre-tokenizer
                       llama   SentencePiece: merges follow from the words' scores, other bytes have words of their own

Names of unused ids, such as "[PAD151665]" if a model has more rows than words, are left out: such an id has no word.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from tandem.checkpoints.gguf.metadata import Metadata

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|" + "{numbers}" + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# The pre-tokenizer for each tokenizer.ggml.pre: a pattern, or "digits": single digits, and else like GPT-2.
_CUTS = {
    "gpt-2": "", "default": "", "smollm": "digits", "starcoder": "digits", "refact": "digits", "codeshell": "digits",
    "llama-bpe": f"{_CONTRACTIONS}|{_WORDS.replace('{numbers}', chr(92) + 'p{N}{1,3}')}",
    "qwen2": f"{_CONTRACTIONS}|{_WORDS.replace('{numbers}', chr(92) + 'p{N}')}",
}  # fmt: skip
_ALIASES = {"llama3": "llama-bpe", "llama-v3": "llama-bpe", "smaug-bpe": "llama-bpe", "qwen": "qwen2"}


def tokenizer_of(metadata: Metadata) -> Tokenizer:
    """Returns the file's tokenizer.

    Raises:
        ValueError: this kind of vocabulary is not supported.
    """
    kind = metadata.need("tokenizer.ggml.model", str)
    words = metadata.need("tokenizer.ggml.tokens", list[Any])
    if not all(isinstance(word, str) for word in words):
        raise ValueError(f"{metadata.file}: tokenizer.ggml.tokens must be texts")
    if kind == "gpt2":
        tokenizer = _byte_level(metadata, words)
    elif kind == "llama":
        tokenizer = _sentencepiece(metadata, words)
    else:
        raise ValueError(f"{metadata.file}: tokenizer.ggml.model {kind!r} is not one of gpt2, llama")
    _add_tokens(tokenizer, metadata, words)
    return tokenizer


def special_tokens_of(metadata: Metadata) -> dict[str, str]:
    """Returns the special tokens by their names in chat templates: bos_token, eos_token, …"""
    words, found = metadata.need("tokenizer.ggml.tokens", list[Any]), {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        at = metadata.get(f"tokenizer.ggml.{key}_token_id", int)
        if at is not None and 0 <= at < len(words):
            found[f"{name}_token"] = words[at]
    return found


def _byte_level(metadata: Metadata, words: list[str]) -> Tokenizer:
    merges = metadata.need("tokenizer.ggml.merges", list[Any])
    if not all(isinstance(merge, str) and " " in merge for merge in merges):
        raise ValueError(f"{metadata.file}: tokenizer.ggml.merges must be pairs of words")
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    ids = _ids(metadata, words)
    tokenizer = _made(metadata, lambda: models.BPE(vocab=ids, merges=pairs))
    tokenizer.pre_tokenizer = _cut(metadata)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _cut(metadata: Metadata) -> Any:
    said = metadata.get("tokenizer.ggml.pre", str) or "default"
    cut = _CUTS.get(_ALIASES.get(said, said))
    if cut is None:
        raise ValueError(f"{metadata.file}: tokenizer.ggml.pre {said!r} is not one of {', '.join([*_CUTS, *_ALIASES])}")
    if cut == "digits":
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    if not cut:
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    split = pre_tokenizers.Split(Regex(cut), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _sentencepiece(metadata: Metadata, words: list[str]) -> Tokenizer:
    scores = metadata.need("tokenizer.ggml.scores", list[Any])
    if len(scores) != len(words):
        raise ValueError(f"{metadata.file}: tokenizer.ggml.scores must have one number a word")
    ids = _ids(metadata, words)
    merges = sorted(_merges(ids), key=lambda merge: (-scores[merge[0]], merge[1:]))
    pairs = [(words[left], words[right]) for _, left, right in merges]
    unknown = special_tokens_of(metadata).get("unk_token")
    tokenizer = _made(
        metadata, lambda: models.BPE(vocab=ids, merges=pairs, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    spaced = metadata.get("tokenizer.ggml.add_space_prefix", bool)
    prefix = [normalizers.Prepend("▁")] if spaced is None or spaced else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(content=" ", left=1)] if prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _ids(metadata: Metadata, words: list[str]) -> dict[str, int]:
    types = metadata.get("tokenizer.ggml.token_type", list[Any]) or []
    return {word: i for i, word in enumerate(words) if types[i : i + 1] != [UNUSED]}


def _merges(ids: dict[str, int]) -> Iterator[tuple[int, int, int]]:
    """Yields (word, left, right) ids for each word that is the concatenation of two others."""
    for word, at in ids.items():
        for cut in range(1, len(word)):
            left, right = ids.get(word[:cut]), ids.get(word[cut:])
            if left is not None and right is not None:
                yield at, left, right


def _made(metadata: Metadata, make: Any) -> Tokenizer:
    try:
        return Tokenizer(make())
    except Exception as error:  # the library raises no narrower type
        raise ValueError(f"{metadata.file}: tokenizer.ggml: {error}") from None


def _add_tokens(tokenizer: Tokenizer, metadata: Metadata, words: list[str]) -> None:
    """Adds the tokens that are never merged from others, and the token that begins a text if the model wants one."""
    types = metadata.get("tokenizer.ggml.token_type", list[Any]) or []
    for word, kind in zip(words, types, strict=False):
        if kind in (CONTROL, UNKNOWN):
            tokenizer.add_special_tokens([AddedToken(word, special=True, normalized=False)])
        elif kind == USER_DEFINED:
            tokenizer.add_tokens([AddedToken(word, special=False, normalized=False)])
    begin, at = special_tokens_of(metadata).get("bos_token"), metadata.get("tokenizer.ggml.bos_token_id", int)
    wanted = metadata.get("tokenizer.ggml.add_bos_token", bool)
    if wanted is None:
        wanted = metadata.get("tokenizer.ggml.model", str) == "llama"
    if wanted and begin and at is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[begin, "$A"], pair=[begin, "$A", "$B"], special_tokens=[(begin, at)]
        )
