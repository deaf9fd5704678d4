"""A large tokenizer in parts, so that tokens stream while it loads: parsing holds the interpreter's lock throughout.

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
from tokenizers.models import BPE, Unigram

from tandem.containment import Bounds

# Smaller files are parsed quickly enough.
SMALL_BYTES = 512 * 1024
PIECE = 2000
# The library reads added tokens under the lock; no model has nearly this many.
MOST_ADDED = 2**16
# Files of other kinds are parsed whole, so they must be small.
MOST_WHOLE = 16 * 2**20
LIMITS = Bounds(cpu_s=30.0, wall_s=60.0, memory_bytes=3 * 2**30, is_last=True)
OPTIONS = {
    "BPE": (
        "dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk", "byte_fallback",
        "ignore_merges",
    ),
    "Unigram": ("unk_id", "byte_fallback"),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TokenizerParts:
    """A tokenizer.json in pieces of JSON.

    Args:
        frame: the file, of its vocabulary the added tokens alone; of Unigram's, whose ids are places in a list, none.
        vocabulary: maps of tokens to ids; of Unigram lists of tokens, each followed by its score.
        merges: lists of tokens, two for each merge.
        added: tokens to be added once there are the others.
        longest_token: in characters.
        vocab_size: more than any id.
    """

    frame: bytes
    options: Mapping[str, Any]
    vocabulary: Sequence[bytes]
    merges: Sequence[bytes]
    added: Sequence[Mapping[str, Any]]
    longest_token: int
    vocab_size: int

    def assemble(self) -> tokenizers.Tokenizer:
        tokenizer = tokenizers.Tokenizer.from_buffer(self.frame)
        if isinstance(tokenizer.model, Unigram):
            tokenizer.model = Unigram(_Pairs(self.vocabulary), **self.options)
        else:
            tokenizer.model = BPE(self._words(), _Pairs(self.merges), **self.options)
        for said in self.added:
            token = tokenizers.AddedToken(**{name: said[name] for name in said if name != "id"})
            (tokenizer.add_special_tokens if token.special else tokenizer.add_tokens)([token])
        return tokenizer

    def _words(self) -> dict[str, Any]:
        words: dict[str, Any] = {}
        for piece in self.vocabulary:
            found = orjson.loads(piece)
            last = next(reversed(found))
            words.update(found)
            words[last] = _Id(words[last])
        return words


def check_tokenizer(path: str) -> None:
    """Load a tokenizer.json in a helper process, to see that it does no harm.

    Raises:
        ValueError: it is malformed.
    """
    _loaded(Path(path).read_bytes(), path)


def parts_of(path: str) -> TokenizerParts | None:
    """Returns a tokenizer.json in parts, divided in a helper process; None for kinds other than BPE and Unigram.

    Raises:
        ValueError: it is malformed, or too long for its kind.
    """
    data = Path(path).read_bytes()
    whole = _loaded(data, path)
    try:
        text = whole.to_str()
        # The library parses some of Unigram's scores to a different last bit.
        parts = _apart(orjson.loads(text if isinstance(whole.model, Unigram) else data))
        if parts.assemble().to_str() == text:
            return parts
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException:  # as below
        pass
    if len(data) > MOST_WHOLE:
        raise ValueError(f"{path}: a tokenizer of this kind has at most {MOST_WHOLE} bytes, got {len(data)}")
    return None


def _loaded(data: bytes, path: str) -> tokenizers.Tokenizer:
    try:
        tokenizer = tokenizers.Tokenizer.from_buffer(data)
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # a panic of the library is no Exception
        raise ValueError(f"{path}: {error}") from None
    if (count := len(tokenizer.get_added_tokens_decoder())) > MOST_ADDED:
        raise ValueError(f"{path}: at most {MOST_ADDED} added tokens, got {count}")
    return tokenizer


def _apart(said: dict[str, Any]) -> TokenizerParts:
    """Raises Exception: it has another structure than expected."""
    model, added = said["model"], {one["content"]: one["id"] for one in said["added_tokens"]}
    options = {name: model[name] for name in OPTIONS[model["type"]] if model.get(name) is not None}
    if model["type"] == "Unigram":
        return _unigram_apart(said, options, added)
    if len(set(model["vocab"].values())) < len(model["vocab"]):
        raise ValueError("two tokens have one id, of which the library takes either")
    merges = [one if isinstance(one, list) else one.split(" ") for one in model["merges"]]
    return TokenizerParts(
        frame=orjson.dumps({**said, "model": {**model, "vocab": added, "merges": []}}),
        options=options,
        vocabulary=[orjson.dumps(dict(piece)) for piece in _pieces(list(model["vocab"].items()))],
        merges=[orjson.dumps(list(chain.from_iterable(piece))) for piece in _pieces(merges)],
        added=(),
        longest_token=max(map(len, chain(model["vocab"], added))),
        vocab_size=1 + max(chain(model["vocab"].values(), added.values())),
    )


def _unigram_apart(said: dict[str, Any], options: Mapping[str, Any], added: Mapping[str, int]) -> TokenizerParts:
    words = said["model"]["vocab"]
    one = {"type": "Unigram", "unk_id": 0, "vocab": [["", 0.0]], "byte_fallback": False}
    return TokenizerParts(
        frame=orjson.dumps({**said, "model": one, "added_tokens": []}),
        options=options,
        vocabulary=[orjson.dumps(list(chain.from_iterable(piece))) for piece in _pieces(words)],
        merges=(),
        added=said["added_tokens"],
        longest_token=max(map(len, chain((word for word, _ in words), added))),
        vocab_size=1 + max(len(words) - 1, *added.values(), 0),
    )


def _pieces(items: list[Any]) -> Iterator[list[Any]]:
    return (items[at : at + PIECE] for at in range(0, len(items), PIECE))


class _Id:
    """A number that the library converts by running Python, so that another thread may take the lock."""

    __slots__ = ("_number",)

    def __init__(self, number: int) -> None:
        self._number = number

    def __index__(self) -> int:
        return self._number


class _Pairs(Sequence[tuple[str, Any]]):
    """The pairs of lists in JSON, parsed when they are needed."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._pieces = pieces

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        for piece in self._pieces:
            items = orjson.loads(piece)
            yield from zip(items[::2], items[1::2], strict=True)

    def __getitem__(self, at: Any) -> Any:
        return list(self)[at]
