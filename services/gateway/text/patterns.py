r"""Patterns by which tokenizers of known families split texts: none is slow on any text.

The library's search may try ten million ways for each character of a text before it gives up, by a pattern that is made
for it: (a+)+$ does with a row of a's. Such a search cannot be ended. So texts of a tokenizer with any other pattern
than these are never read on the event loop.
"""

from __future__ import annotations

from typing import Any

import tokenizers

from tandem.vocabulary import parts_of

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+{tail}"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*{tail}"
    r"|\p{N}{numbers}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{numbers}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
KNOWN = frozenset(
    {
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",  # GPT-2
        f"{_CONTRACTIONS}|{_WORDS.replace('{numbers}', '{1,3}')}",  # Llama 3, GLM-4, SmolLM3
        f"{_CONTRACTIONS}|{_WORDS.replace('{numbers}', '')}",  # Qwen 2 and 3
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}"  # OLMo 2
        r"| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
        _CASED.replace("{tail}", f"{_CONTRACTIONS}?").replace("{numbers}", "{1,3}"),  # gpt-oss, Phi-4-mini
        _CASED.replace("{tail}", "").replace("{numbers}", ""),  # Mistral's later ones
        r"\p{N}{1,3}",  # DeepSeek V3: this and the next two
        "[一-龥぀-ゟ゠-ヿ]+",
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        r"(?<=\b(?:def|class|import|from|return|if|elif|for|in|as|with|raise|while|except|assert|not|and|or|is|yield))"
        " ",  # the demo model
        " {2,}",
        r"\d",
        r"\s+",
    }
)


def has_known_patterns(tokenizer: tokenizers.Tokenizer) -> bool:
    """True if this tokenizer reads any text in linear time."""
    parts = [*parts_of(tokenizer.normalizer), *parts_of(tokenizer.pre_tokenizer)]
    return all(pattern in KNOWN for part in parts for pattern in _regexes(part))


def _regexes(part: dict[str, Any]) -> list[Any]:
    """Returns a part's patterns; a part written in Python may have any."""
    if not part["type"]:
        return [None]
    pattern = part.get("pattern")
    return [pattern["Regex"]] if isinstance(pattern, dict) and "Regex" in pattern else []
