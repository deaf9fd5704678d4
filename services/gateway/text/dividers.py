"""Dividers: added tokens after which the rest of a text can be tokenized apart from what comes before.

The library first finds the added tokens that are not normalized, from left to right, the longest of those that begin at
one place. Normalizer, pre-tokenizer and model then see the text between two of them, one stretch at a time. So tokens
of a stretch depend on that stretch alone, and on whether it begins the text (Metaspace prepends a space to that one):

    ids(a + divider + b) = ids(a + divider) + ids(divider + b) without its first

This holds where a divider is found at each place where its characters are, whatever stands around them. Then no match
reaches across the end of a divider, and the search for the next one begins there, with no memory of what was before.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tokenizers
from tokenizers import models

from tandem.vocabulary import parts_of

# Kinds known to work on each stretch by itself. With any other kind texts are not divided.
NORMALIZERS = frozenset(
    {
        "BertNormalizer", "ByteLevel", "Lowercase", "NFC", "NFD", "NFKC", "NFKD", "Nmt", "Precompiled", "Prepend",
        "Replace", "Strip", "StripAccents",
    }
)  # fmt: skip
PRE_TOKENIZERS = frozenset(
    {
        "BertPreTokenizer", "ByteLevel", "CharDelimiterSplit", "Digits", "FixedLength", "Metaspace", "Punctuation",
        "Split", "UnicodeScripts", "Whitespace", "WhitespaceSplit",
    }
)  # fmt: skip
PROCESSORS = frozenset({"BertProcessing", "ByteLevel", "RobertaProcessing", "TemplateProcessing"})
MODELS = (models.BPE, models.Unigram, models.WordLevel, models.WordPiece)
# The most beginnings and ends of tokens to compare: 60,000 tokens of common lengths have fewer.
MOST_CHARACTERS = 2**25
# A model with one of these tokenizes at random.
CHANCE = ("dropout", "alpha", "nbest_size")


def dividers_of(tokenizer: tokenizers.Tokenizer) -> list[str]:
    """Returns the tokenizer's dividers, for prompts without a post-processor's special tokens.

    There are none if any part of the tokenizer is not known to allow them.
    """
    if not (_encodes_stretches(tokenizer) and _adds_nothing(tokenizer)):
        return []
    found = [token for token in tokenizer.get_added_tokens_decoder().values() if not token.normalized]
    # A token that is a single word matches only between some characters. One that strips spaces does so anywhere.
    always = {token.content for token in found if not token.single_word}
    if sum(len(token.content) ** 2 for token in found) > MOST_CHARACTERS:
        return []
    return sorted(always - _overlapping(always, [token.content for token in found]))


def _encodes_stretches(tokenizer: tokenizers.Tokenizer) -> bool:
    model = tokenizer.model
    return (
        isinstance(model, MODELS)
        and not any(getattr(model, name, None) for name in CHANCE)
        and not tokenizer.encode_special_tokens
        and _kinds(tokenizer.normalizer) <= NORMALIZERS
        and _kinds(tokenizer.pre_tokenizer) <= PRE_TOKENIZERS
    )


def _adds_nothing(tokenizer: tokenizers.Tokenizer) -> bool:
    """True if the post-processor changes nothing when no special tokens are asked for."""
    if tokenizer.truncation or tokenizer.padding or not _kinds(tokenizer.post_processor) <= PROCESSORS:
        return False
    templates = (part["single"] for part in parts_of(tokenizer.post_processor) if part["type"] == "TemplateProcessing")
    return all([piece["Sequence"]["id"] for piece in one if "Sequence" in piece] == ["A"] for one in templates)


def _kinds(component: Any) -> set[str]:
    return {part["type"] for part in parts_of(component)}


def _overlapping(tokens: set[str], others: Iterable[str]) -> set[str]:
    """Returns the tokens that another token, or the same one elsewhere, may overlap in some text."""
    found, lengths = set[str](), {len(token) for token in tokens}
    heads = {token[:end] for token in tokens for end in range(1, len(token))}
    for other in others:
        within = {other[at : at + n] for n in lengths if n < len(other) for at in range(len(other) - n + 1)}
        found |= within & tokens
        for tail in {other[at:] for at in range(1, len(other))} & heads:
            found |= {token for token in tokens if token.startswith(tail)}
    return found
