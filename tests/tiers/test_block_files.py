"""Blocks as files: what is found is what was written under that name, whatever became of the files meanwhile."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from hashlib import blake2b
from pathlib import Path
from random import Random
from struct import Struct
from time import sleep, time
from typing import Any

import pytest
from structlog.testing import capture_logs

from tandem.tiers import BlockFiles, KeepRules, block_files, owner_of

LAYOUT, OTHER = "ab" * 16, "cd" * 16
SIZE = 512
OWNERS = [owner_of("ann"), owner_of("bob")]
OF_ANN = 7  # so many of each ten blocks, by number, are the first owner's


def name_of(number: int) -> bytes:
    return blake2b(number.to_bytes(4, "little"), digest_size=16).digest()


def block_of(number: int) -> bytes:
    return Random(number).randbytes(SIZE)


def of(number: int) -> bytes:
    return OWNERS[number % 10 >= OF_ANN]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kv"


@pytest.fixture
def opened(folder: Path) -> Iterator[Callable[..., BlockFiles]]:
    made: list[BlockFiles] = []

    def open_files(layout: str = LAYOUT, blocks: int = 64, **how: Any) -> BlockFiles:
        budget = blocks * (SIZE + block_files.HEADER.size)
        made.append(BlockFiles(folder, layout, block_bytes=SIZE, budget_bytes=budget, **how))
        return made[-1]

    yield open_files
    for files in made:
        files.close()


def written(files: BlockFiles, *numbers: int) -> BlockFiles:
    for number in numbers:
        files.write(name_of(number), of(number), memoryview(block_of(number)))
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
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) <= 4 * (
        SIZE + block_files.HEADER.size
    )
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


FIRST = Struct("<8sII16s16sQQ")  # the header of version 1


def stale(path: Path, dice: Random) -> None:
    data = path.read_bytes()
    _, _, _, layout, name, _, *rest = block_files.HEADER.unpack(data[: block_files.HEADER.size])
    path.write_bytes(FIRST.pack(b"TANDEMKV", 1, 0, layout, name, *rest) + data[block_files.HEADER.size :])


def of_another_version(path: Path, dice: Random) -> None:
    data = bytearray(path.read_bytes())
    data[8] = 1
    path.write_bytes(data)


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

    def of_another(path: Path, dice: Random) -> None:
        data = bytearray(path.read_bytes())
        data[48:56] = next(owner for owner in OWNERS if owner != data[48:56])
        path.write_bytes(data)

    def between_tenants(path: Path, dice: Random) -> None:
        shutil.copyfile(dice.choice([other for other in paths if other.parts[-3] != path.parts[-3]][:9]), path)

    return {
        "truncated": lambda path, dice: os.truncate(path, dice.randrange(path.stat().st_size)),
        "longer": lambda path, dice: path.write_bytes(path.read_bytes() + dice.randbytes(1 + dice.randrange(9))),
        "empty": lambda path, dice: path.write_bytes(b""),
        "noise": lambda path, dice: path.write_bytes(dice.randbytes(path.stat().st_size)),
        "gone": lambda path, dice: path.unlink(),
        "flipped": flipped, "swapped": swapped, "foreign": foreign, "stale": stale,
        "of another": of_another, "swapped between tenants": between_tenants, "version": of_another_version,
    }  # fmt: skip


@pytest.mark.parametrize("after_restart", [False, True])
@pytest.mark.parametrize("num_files", [300, pytest.param(50_000, marks=pytest.mark.long)])
def test_of_damaged_files_every_one_is_a_miss(
    opened: Callable[..., BlockFiles], folder: Path, num_files: int, after_restart: bool
) -> None:
    """All kinds; each is said once, but of a file that is gone nobody knows."""
    dice, files = Random(7), written(opened(blocks=num_files), *range(num_files))
    paths = sorted(folder.glob(f"{LAYOUT}-*/*/??/*"))
    kinds = damages(paths)
    wrong = damaged(dice.sample(paths, num_files // 2), kinds, dice)
    assert set(wrong.values()) == set(kinds)
    there = {str(path) for path in wrong if path.exists()}
    with capture_logs() as logs:
        if after_restart:
            files.close()
            files = opened(blocks=num_files)
        found = [read(files, number) for number in range(num_files)]
        assert [read(files, number) for number in range(num_files)] == found, "a miss stays one, a hit too"
    assert all(block in (None, block_of(number)) for number, block in enumerate(found))
    assert found.count(None) == len(wrong)
    said = [entry["file"] for entry in logs]
    assert (sorted(said), len(set(said)), files.num_damaged) == (sorted(there), len(said), len(there))


def damaged(paths: list[Path], kinds: dict[str, Callable[[Path, Random], None]], dice: Random) -> dict[Path, str]:
    """Damage files, as many of each kind. Returns those that are not as they were, and the kind."""
    wrong = {}
    for number, path in enumerate(paths):
        was, kind = path.read_bytes(), sorted(kinds)[number % len(kinds)]
        kinds[kind](path, dice)
        if not path.exists() or path.read_bytes() != was:  # what is swapped may have been what it was
            wrong[path] = kind
    return wrong


def test_files_of_the_first_version_are_removed_and_said_once(opened: Callable[..., BlockFiles], folder: Path) -> None:
    for number in range(20):
        path = folder / f"{LAYOUT}-0" / name_of(number)[:1].hex() / name_of(number)[1:].hex()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(FIRST.pack(b"TANDEMKV", 1, 0, b"", name_of(number), SIZE, 0) + block_of(number))
    with capture_logs() as logs:
        files = opened()
    assert [entry["event"] for entry in logs] == ["KV blocks on disk are of an older version, and are removed"]
    assert [read(files, number) for number in range(20)] == [None] * 20
    assert len(written(files, 1)) == 1
    eventually_gone(folder)


def eventually_gone(folder: Path) -> None:
    """Waits for what was dropped to be deleted, too."""
    for _ in range(6000):
        if not any(folder.glob("*/dropped-*")):
            return
        sleep(0.01)
    raise AssertionError("dropped files are still there")


def test_nobody_reads_a_tenants_name_in_the_folder(opened: Callable[..., BlockFiles], folder: Path) -> None:
    written(opened(), *range(10))
    owners = sorted(path.name for path in (folder / f"{LAYOUT}-0").iterdir() if path.is_dir())
    assert owners == sorted(owner.hex() for owner in OWNERS)


@pytest.mark.parametrize("num_files", [400, pytest.param(100_000, marks=pytest.mark.long)])
def test_what_is_dropped_is_gone_at_once_and_after_a_restart(
    opened: Callable[..., BlockFiles], folder: Path, num_files: int
) -> None:
    left = written(opened(blocks=num_files), 0, OF_ANN)
    files = written(opened(blocks=num_files), *range(1, num_files))
    left.close()
    another = written(opened(OTHER), 1)
    another.close()
    ann, bob = [[number for number in range(1, num_files) if of(number) == owner] for owner in OWNERS]
    assert files.drop(OWNERS[0]) == len(ann)
    assert files.counts == {OWNERS[1]: len(bob)}
    assert [read(files, number) for number in ann[:100]] == [None] * 100
    assert [read(files, number) for number in bob[:100]] == [block_of(number) for number in bob[:100]]
    assert not any(folder.glob(f"{LAYOUT}-*/{OWNERS[0].hex()}")), "also where no process is at work"
    assert any(folder.glob(f"{OTHER}-*/{OWNERS[0].hex()}")), "but of no other model"
    eventually_gone(folder)
    files.close()
    first, second = opened(blocks=num_files), opened(blocks=num_files)
    assert sorted(map(len, (first, second))) == [1, len(bob)]
    first.drop(None)
    second.drop(None)
    assert len(first) == len(second) == 0
    assert not any(folder.glob(f"{LAYOUT}-*/{'[0-9a-f]' * 16}")), "of nobody"


def test_a_tenant_at_its_share_gives_up_its_own(opened: Callable[..., BlockFiles], folder: Path) -> None:
    files = written(opened(blocks=40, rules=KeepRules(tenant_share=0.25)), *range(7, 10), *range(100, 107))
    written(files, *range(110, 117), *range(120, 127))
    assert files.counts == {OWNERS[0]: 10, OWNERS[1]: 3}
    assert [read(files, number) is not None for number in (7, 8, 9, 106, 113, 114, 126)] == [True] * 3 + [
        False, False, True, True,
    ]  # fmt: skip
    assert len(list(folder.glob("*/*/??/*"))) == 13


def test_what_nobody_has_used_for_long_is_a_miss_and_goes(opened: Callable[..., BlockFiles], folder: Path) -> None:
    now = time()
    files = written(opened(rules=KeepRules(ttl_s=60, now=lambda: now)), 1, 2, 3)
    now += 50
    files.touch([name_of(2)])
    now += 20
    assert [name_of(number) in files for number in (1, 2, 3)] == [False, True, False]
    assert [read(files, number) for number in (1, 2)] == [None, block_of(2)]
    assert (files.expire(1), files.expire(9), len(files)) == (1, 1, 1)
    assert len(list(folder.glob("*/*/??/*"))) == 1
    files.close()
    now = time() + 61
    assert read(opened(rules=KeepRules(ttl_s=60, now=lambda: now)), 2) is None, "a restart makes nothing younger"


def test_a_full_disk_is_said_and_leaves_nothing_wrong(opened: Callable[..., BlockFiles], folder: Path) -> None:
    files = written(opened(), 1)
    folder_of_2 = folder / f"{LAYOUT}-0" / of(2).hex() / name_of(2)[:1].hex()
    folder_of_2.write_bytes(b"")  # no folder can be made there
    with pytest.raises(OSError, match="exists"):
        written(files, 2)
    assert (read(files, 1), name_of(2) in files) == (block_of(1), False)


def test_a_budget_below_one_block_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="kv_disk: 100 bytes are less than one block"):
        BlockFiles(folder, LAYOUT, block_bytes=SIZE, budget_bytes=100)
