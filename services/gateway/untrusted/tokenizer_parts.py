"""A large tokenizer, loaded while tokens stream: the library holds the interpreter's lock for as long as it parses one.

    helper process    tokenizer.json ──> TokenizerParts: JSON in pieces, which are checked to make the same tokenizer
    thread            each piece is parsed, then handed to the model as that asks for it; others run in between

What is left under the lock is the building of the model's own tables, a sixth of the whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import orjson
import tokenizers
from tokenizers.models import BPE

from tandem.containment import Bounds

# Smaller files are parsed in less time than anyone notices.
SMALL_BYTES = 512 * 1024
PIECE = 2000
# The library reads added tokens under the lock, and no model has nearly as many.
MOST_ADDED = 2**16
LIMITS = Bounds(cpu_s=30.0, wall_s=60.0, memory_bytes=3 * 2**30, is_last=True)
OPTIONS = (
    "dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk", "byte_fallback",
    "ignore_merges",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class TokenizerParts:
    frame: bytes  # tokenizer.json with no more of a vocabulary than its added tokens
    options: Mapping[str, Any]
    vocabulary: Sequence[bytes]  # maps of tokens to ids
    merges: Sequence[bytes]  # lists of tokens, two for each merge
    longest_token: int  # in characters
    vocab_size: int  # more than any id

    def assemble(self) -> tokenizers.Tokenizer:
        tokenizer = tokenizers.Tokenizer.from_buffer(self.frame)
        words: dict[str, Any] = {}
        for piece in self.vocabulary:
            found = orjson.loads(piece)
            last = next(reversed(found))
            words.update(found)
            words[last] = _Id(words[last])
        tokenizer.model = BPE(words, _Merges(self.merges), **self.options)
        return tokenizer


def check_tokenizer(path: str) -> None:
    """Loads a tokenizer.json, in a helper process: what that survives, a gateway does.

    Raises:
        ValueError: it is malformed.
    """
    _loaded(Path(path).read_bytes(), path)


def parts_of(path: str) -> TokenizerParts | None:
    """Takes a tokenizer.json apart, in a helper process; returns None where it is of another kind than BPE.

    Raises:
        ValueError: it is malformed.
    """
    data = Path(path).read_bytes()
    whole = _loaded(data, path)
    try:
        parts = _apart(orjson.loads(data))
        return parts if parts.assemble().to_str() == whole.to_str() else None
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException:  # some damage makes the library panic, which is no Exception
        return None


def _loaded(data: bytes, path: str) -> tokenizers.Tokenizer:
    try:
        tokenizer = tokenizers.Tokenizer.from_buffer(data)
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # as above
        raise ValueError(f"{path}: {error}") from None
    if (count := len(tokenizer.get_added_tokens_decoder())) > MOST_ADDED:
        raise ValueError(f"{path}: at most {MOST_ADDED} added tokens, got {count}")
    return tokenizer


def _apart(said: dict[str, Any]) -> TokenizerParts:
    """
    Raises:
        Exception: it is not as expected.
    """
    model, added = said["model"], {one["content"]: one["id"] for one in said["added_tokens"]}
    if model["type"] != "BPE" or len(set(model["vocab"].values())) < len(model["vocab"]):
        raise ValueError("it is no BPE, or two tokens have one id, of which the library takes either")
    merges = [one if isinstance(one, list) else one.split(" ") for one in model["merges"]]
    return TokenizerParts(
        frame=orjson.dumps({**said, "model": {**model, "vocab": added, "merges": []}}),
        options={name: model[name] for name in OPTIONS if model.get(name) is not None},
        vocabulary=[orjson.dumps(dict(piece)) for piece in _pieces(list(model["vocab"].items()))],
        merges=[orjson.dumps(list(chain.from_iterable(piece))) for piece in _pieces(merges)],
        longest_token=max(map(len, chain(model["vocab"], added))),
        vocab_size=1 + max(chain(model["vocab"].values(), added.values())),
    )


def _pieces(items: list[Any]) -> Iterator[list[Any]]:
    return (items[at : at + PIECE] for at in range(0, len(items), PIECE))


class _Id:
    """A number that the library asks for by running Python, where another thread may take the lock."""

    __slots__ = ("_number",)

    def __init__(self, number: int) -> None:
        self._number = number

    def __index__(self) -> int:
        return self._number


class _Merges(Sequence[tuple[str, str]]):
    """All pairs, parsed as they are asked for."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._pieces = pieces

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __iter__(self) -> Iterator[tuple[str, str]]:
        for piece in self._pieces:
            tokens = orjson.loads(piece)
            yield from zip(tokens[::2], tokens[1::2], strict=True)

    def __getitem__(self, at: Any) -> Any:
        return list(self)[at]
