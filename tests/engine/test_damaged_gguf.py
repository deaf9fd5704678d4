"""A GGUF file with any bytes changed: an error that names it, or a folder, for no more work than the file has bytes."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.checkpoints.gguf import folder_of
from tandem.checkpoints.gguf.reader import GgufHeader
from tests.engine.gguf_files import make_file
from tests.fuzzing import fuzzed

LARGE = (0, 1, 2**16, 2**31, 2**32 - 1, 2**40, 2**60, 2**63, 2**64 - 1)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    make_file(path, "llama", "Q8_0")
    return path.read_bytes()


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many bytes each read gave."""
    made = list[int]()
    read = GgufHeader.take

    def counted(self: GgufHeader, count: int) -> bytes:
        found = read(self, count)
        made.append(len(found))
        return found

    monkeypatch.setattr(GgufHeader, "take", counted)
    return made


def check(content: bytes, place: Path, reads: list[int]) -> str:
    """Returns what is wrong with a file of this content; nothing where it serves."""
    place.mkdir(exist_ok=True)
    (place / "m.gguf").write_bytes(content)
    reads.clear()
    wrong = ""
    try:
        folder_of(place / "m.gguf", place / "cache")
    except ValueError as error:
        wrong = str(error)
    assert not wrong or "m.gguf: " in wrong
    assert max(sum(reads), len(reads)) <= len(content)
    return wrong


@pytest.mark.parametrize("count", LARGE[3:])
@pytest.mark.parametrize("key", ["tokenizer.ggml.token_type", "tokenizer.ggml.tokens", "tokenizer.ggml.merges"])
def test_a_list_is_no_longer_than_the_file(
    whole: bytes, tmp_path: Path, reads: list[int], key: str, count: int
) -> None:
    at = whole.index(key.encode()) + len(key) + 8  # behind its type, and that of its members
    for kind in (None, 0, 4, 7, 8, 9):
        content = bytearray(whole)
        struct.pack_into("<Q", content, at, count)
        if kind is not None:
            struct.pack_into("<I", content, at - 4, kind)
        assert "is damaged" in check(bytes(content), tmp_path / str(kind), reads)


@pytest.mark.parametrize("count", LARGE[3:])
@pytest.mark.parametrize("at", [8, 16])
def test_counts_of_the_head_are_bounded(whole: bytes, tmp_path: Path, reads: list[int], at: int, count: int) -> None:
    content = bytearray(whole)
    struct.pack_into("<Q", content, at, count)
    assert "is damaged" in check(bytes(content), tmp_path / "x", reads)


def test_any_bytes_may_be_others(whole: bytes, tmp_path: Path, reads: list[int]) -> None:
    head = whole.index(b"blk.0.attn_norm") + 2000
    places = st.integers(4, head)
    changes = st.tuples(places, st.binary(min_size=1, max_size=4)) | st.tuples(
        places, st.sampled_from([struct.pack("<Q", number) for number in LARGE])
    )

    @fuzzed(300)
    @given(st.lists(changes, min_size=1, max_size=4))
    def try_one(changed: list[tuple[int, bytes]]) -> None:
        content = bytearray(whole)
        for at, new in changed:
            content[at : at + len(new)] = new
        check(bytes(content), tmp_path / "x", reads)

    try_one()
