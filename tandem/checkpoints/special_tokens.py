"""The special tokens that a model's folder names, by transformers' rules, and the tokens that end an answer.

tokenizer_config.json     `*_token`, and the named ones of `extra_special_tokens`
special_tokens_map.json   takes precedence if tokenizer_config.json lists no added tokens
generation_config.json    ids that end an answer, else config.json's; the tokenizer's eos_token in any case
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic import ConfigDict

from tandem.checkpoints.model_files import (
    GENERATION_FILE,
    TOKENIZER_CONFIG,
    CallsFile,
    EndsFile,
    ModelFile,
    read_bytes,
    read_file,
)

TOKENIZER, SPECIAL_TOKENS = "tokenizer.json", "special_tokens_map.json"
EOS = "eos_token"


class _NamedTemplate(ModelFile):
    name: str
    template: str


class _AddedToken(ModelFile):
    content: str


class TokenizerConfigFile(CallsFile):
    """The file tokenizer_config.json; its undeclared fields may be special tokens."""

    model_config = ConfigDict(extra="allow")

    chat_template: str | list[_NamedTemplate] | None = None
    added_tokens_decoder: dict[str, _AddedToken] | None = None
    extra_special_tokens: Any = None


class _TokensFile(ModelFile):
    model_config = ConfigDict(extra="allow")


def special_tokens(folder: Path) -> dict[str, str]:
    """Returns the special tokens' texts by role: bos_token, eos_token, and others that a chat template may name.

    Raises:
        OSError, ValueError: a file cannot be read.
    """
    config = read_tokenizer_config(folder)
    found = _texts(config.model_extra or {})
    if isinstance(config.extra_special_tokens, dict):
        found |= _texts({name: text for name, text in config.extra_special_tokens.items() if name.endswith("_token")})
    if config.added_tokens_decoder is None and (file := folder / SPECIAL_TOKENS).is_file():
        found |= _texts(read_file(_TokensFile, file).model_extra or {})
    return found


def end_tokens(folder: Path, token_to_id: Callable[[str], int | None] | None = None) -> tuple[int, ...]:
    """Returns the ids that end an answer of the model.

    Args:
        token_to_id: a method of the model's tokenizer; None: ids are read from the folder.

    Raises:
        OSError, ValueError: a file cannot be read.
    """
    found = _configured(folder)
    if text := special_tokens(folder).get(EOS):
        own = token_to_id(text) if token_to_id else _id_of(folder, text)
        if own is not None and own not in found:
            found = (*found, own)
    return found


def read_tokenizer_config(folder: Path) -> TokenizerConfigFile:
    """Returns the folder's tokenizer_config.json; an empty one if it is missing.

    Raises:
        OSError, ValueError: the file cannot be read.
    """
    file = folder / TOKENIZER_CONFIG
    return read_file(TokenizerConfigFile, file) if file.is_file() else TokenizerConfigFile()


def _configured(folder: Path) -> tuple[int, ...]:
    for name in (GENERATION_FILE, "config.json"):
        file = folder / name
        ids = read_file(EndsFile, file).eos_token_id if file.is_file() else None
        if ids is not None:
            return tuple(ids) if isinstance(ids, list) else (ids,)
    return ()


def _texts(said: Mapping[str, Any]) -> dict[str, str]:
    """Returns the texts of tokens that are strings, or objects with `content`."""
    found = {}
    for name, value in said.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            found[name] = text
    return found


def _id_of(folder: Path, text: str) -> int | None:
    for key, token in (read_tokenizer_config(folder).added_tokens_decoder or {}).items():
        if token.content == text and key.isdecimal():
            return int(key)
    file = folder / TOKENIZER
    return _id_in(file, text) if file.is_file() else None


def _id_in(file: Path, text: str) -> int | None:
    """Returns a token's id in a tokenizer.json: among the added tokens, else in the vocabulary."""
    try:
        said = json.loads(read_bytes(file))
        found = next((one["id"] for one in said.get("added_tokens") or () if one["content"] == text), None)
        words = said["model"].get("vocab")
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise ValueError(f"{file}: {type(error).__name__}: {error}") from None
    if found is None and isinstance(words, dict):
        found = words.get(text)
    return found if isinstance(found, int) and 0 <= found < 2**31 else None
