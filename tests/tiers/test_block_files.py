"""Blocks as files: what is found is what was written under that name, whatever became of the files meanwhile."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from hashlib import blake2b
from pathlib import Path
from random import Random

import pytest

from tandem.tiers import BlockFiles, block_files

LAYOUT, OTHER = "ab" * 16, "cd" * 16
SIZE = 512


def name_of(number: int) -> bytes:
    return blake2b(number.to_bytes(4, "little"), digest_size=16).digest()


def block_of(number: int) -> bytes:
    return Random(number).randbytes(SIZE)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kv"


@pytest.fixture
def opened(folder: Path) -> Iterator[Callable[..., BlockFiles]]:
    made: list[BlockFiles] = []

    def open_files(layout: str = LAYOUT, blocks: int = 64) -> BlockFiles:
        budget = blocks * (SIZE + block_files.HEADER.size)
        made.append(BlockFiles(folder, layout, block_bytes=SIZE, budget_bytes=budget))
        return made[-1]

    yield open_files
    for files in made:
        files.close()


def written(files: BlockFiles, *numbers: int) -> BlockFiles:
    for number in numbers:
        files.write(name_of(number), memoryview(block_of(number)))
    return files


def read(files: BlockFiles, number: int) -> bytes | None:
    block = bytearray(SIZE)
    return bytes(block) if files.read(name_of(number), memoryview(block)) else None


def test_what_was_written_is_read_by_this_process_and_the_next(opened: Callable[..., BlockFiles]) -> None:
    files = written(opened(), *range(9))
    assert [read(files, number) for number in range(9)] == [block_of(number) for number in range(9)]
    assert read(files, 9) is None
    files.close()
    files = opened()
    assert len(files) == 9
    assert name_of(8) in files
    assert [read(files, number) for number in range(9)] == [block_of(number) for number in range(9)]


def test_beyond_the_budget_what_was_used_longest_ago_goes(opened: Callable[..., BlockFiles], folder: Path) -> None:
    files = written(opened(blocks=4), 0, 1, 2, 3)
    files.touch([name_of(1), name_of(0)])
    written(files, 4, 5)
    assert [read(files, number) is not None for number in range(6)] == [True, True, False, False, True, True]
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) <= 4 * (SIZE + 64)
    files.touch([name_of(0)])
    files.close()
    fewer = opened(blocks=1)
    assert (len(fewer), read(fewer, 0)) == (1, block_of(0))


def test_each_process_has_a_folder_of_its_own(opened: Callable[..., BlockFiles]) -> None:
    first, second, other = written(opened(), 1), opened(), opened(OTHER)
    assert (read(first, 1), read(second, 1), read(other, 1)) == (block_of(1), None, None)
    written(second, 1)
    assert read(second, 1) == block_of(1)


def test_a_folder_that_nobody_has_used_for_long_is_removed(opened: Callable[..., BlockFiles], folder: Path) -> None:
    for layout, age_s in ((OTHER, block_files.KEEP_S + 60), ("ef" * 16, block_files.KEEP_S - 600)):
        old = written(opened(layout), 1)
        old.close()
        lock = folder / f"{layout}-0" / block_files.LOCK
        os.utime(lock, (lock.stat().st_atime, lock.stat().st_mtime - age_s))
    opened()
    assert sorted(path.name for path in folder.iterdir()) == [f"{LAYOUT}-0", f"{'ef' * 16}-0"]


def damages(paths: list[Path]) -> dict[str, Callable[[Path, Random], None]]:
    def flipped(path: Path, dice: Random) -> None:
        data = bytearray(path.read_bytes())
        data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
        path.write_bytes(data)

    def swapped(path: Path, dice: Random) -> None:
        others = (other for other in dice.sample(paths, 9) if other != path and other.exists())
        shutil.copyfile(next(others), path)

    def foreign(path: Path, dice: Random) -> None:
        data = bytearray(path.read_bytes())
        data[16:32] = bytes.fromhex(OTHER)
        path.write_bytes(data)

    return {
        "truncated": lambda path, dice: os.truncate(path, dice.randrange(path.stat().st_size)),
        "longer": lambda path, dice: path.write_bytes(path.read_bytes() + dice.randbytes(1 + dice.randrange(9))),
        "empty": lambda path, dice: path.write_bytes(b""),
        "noise": lambda path, dice: path.write_bytes(dice.randbytes(path.stat().st_size)),
        "gone": lambda path, dice: path.unlink(),
        "flipped": flipped, "swapped": swapped, "foreign": foreign,
    }  # fmt: skip


@pytest.mark.parametrize("after_restart", [False, True])
@pytest.mark.parametrize("num_files", [300, pytest.param(50_000, marks=pytest.mark.long)])
def test_of_damaged_files_every_one_is_a_miss(
    opened: Callable[..., BlockFiles], folder: Path, num_files: int, after_restart: bool
) -> None:
    dice, files = Random(7), written(opened(blocks=num_files), *range(num_files))
    paths = sorted(folder.glob(f"{LAYOUT}-*/??/*"))
    kinds = damages(paths)
    for path in dice.sample(paths, num_files // 2):
        kinds[dice.choice(sorted(kinds))](path, dice)
    if after_restart:
        files.close()
        files = opened(blocks=num_files)
    found = [read(files, number) for number in range(num_files)]
    assert all(block in (None, block_of(number)) for number, block in enumerate(found))
    assert 0.49 * num_files < found.count(None) <= num_files // 2  # one may be damaged into what it was
    assert [read(files, number) for number in range(num_files)] == found, "a miss stays one, a hit too"


def test_a_full_disk_is_said_and_leaves_nothing_wrong(opened: Callable[..., BlockFiles], folder: Path) -> None:
    files = written(opened(), 1)
    folder_of_2 = folder / f"{LAYOUT}-0" / name_of(2)[:1].hex()
    folder_of_2.write_bytes(b"")  # no folder can be made there
    with pytest.raises(OSError, match="exists"):
        written(files, 2)
    assert (read(files, 1), name_of(2) in files) == (block_of(1), False)


def test_a_budget_below_one_block_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="kv_disk: 100 bytes are less than one block"):
        BlockFiles(folder, LAYOUT, block_bytes=SIZE, budget_bytes=100)
