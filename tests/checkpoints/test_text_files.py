"""The files of a model that a gateway needs: named by what is in them, kept on disk, damage noticed."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from tandem.checkpoints import TEXT_FILES, TextFiles, text_file, text_fingerprint
from tests.gateway.tiny_model import write_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def kept(tmp_path: Path) -> TextFiles:
    return TextFiles(tmp_path / "cache")


def files_of(folder: Path) -> dict[str, bytes]:
    return {name: data for name in TEXT_FILES if (data := text_file(folder, name)) is not None}


def test_what_was_kept_is_found_and_is_the_same(folder: Path, kept: TextFiles) -> None:
    fingerprint = text_fingerprint(folder)
    assert kept.find(fingerprint) is None
    made = kept.keep(files_of(folder), fingerprint)
    assert kept.find(fingerprint) == made
    assert files_of(made) == files_of(folder)
    assert kept.keep(files_of(folder), fingerprint) == made  # as by another process, at the same time
    assert [path.name for path in made.parent.iterdir()] == [fingerprint]


@pytest.mark.parametrize("name", TEXT_FILES)
def test_every_file_counts(folder: Path, tmp_path: Path, name: str) -> None:
    shutil.copytree(folder, tmp_path / "other")
    before = text_fingerprint(folder)
    file = tmp_path / "other" / name
    file.parent.mkdir(exist_ok=True)
    said = file.read_bytes() if file.exists() else b"{}"
    file.write_bytes(b'{"max_position_embeddings": 64}' if name == "config.json" else said + b"\n")
    assert text_fingerprint(tmp_path / "other") not in ("", before)


def test_what_only_weights_need_does_not_count(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "other")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "other" / "config.json").write_text(json.dumps(config | {"torch_dtype": "bfloat16"}), encoding="utf-8")
    (tmp_path / "other" / "model.safetensors").touch()
    assert text_fingerprint(tmp_path / "other") == text_fingerprint(folder)


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json"])
def test_without_what_is_needed_there_is_no_fingerprint(folder: Path, tmp_path: Path, name: str) -> None:
    shutil.copytree(folder, tmp_path / "other")
    (tmp_path / "other" / name).unlink()
    assert text_fingerprint(tmp_path / "other") == ""


def test_other_files_are_not_kept(folder: Path, kept: TextFiles) -> None:
    fingerprint = text_fingerprint(folder)
    for wrong in ({"tokenizer.json": b"{}"}, {"../config.json": b"{}"}, {}):
        with pytest.raises(ValueError, match="not those of fingerprint"):
            kept.keep(files_of(folder) | wrong if wrong else {}, fingerprint)
    assert kept.find(fingerprint) is None


def test_what_was_damaged_on_disk_is_forgotten(folder: Path, kept: TextFiles) -> None:
    fingerprint = text_fingerprint(folder)
    made = kept.keep(files_of(folder), fingerprint)
    (made / "tokenizer.json").write_bytes(b"{")
    assert kept.find(fingerprint) is None
    assert not made.exists()


def test_a_disk_that_nobody_may_write_to_keeps_nothing_for_others(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    (tmp_path / "file").touch()
    kept, fingerprint = TextFiles(tmp_path / "file" / "cache"), text_fingerprint(folder)
    made = kept.keep(files_of(folder), fingerprint)
    assert kept.find(fingerprint) == made
    assert os.path.commonpath([made, tmp_path]) == str(tmp_path)
