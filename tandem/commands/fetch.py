"""`tandem fetch`: a model's files from wherever they are kept, checked byte for byte. It does so before a pod starts.

    [hf://]organisation/model@revision   smollm2   s3://bucket/prefix   file:///folder   whatever fsspec speaks

1 there    files that are whole already stay
2 fetch    the others: of a hub those that serve the model, elsewhere all
3 check    each file's SHA-256; one of other bytes is removed
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from hashlib import file_digest
from pathlib import Path

import fsspec
from pydantic import Field
from pydantic_settings import CliPositionalArg

from tandem.checkpoints import HUB, WHEELS, fetch_files, find_model, is_hub_name, is_name, wanted_files
from tandem.settings import Settings, load

Names = Callable[[], list[str]]
Get = Callable[[list[str], Path], None]


class FetchSettings(Settings):
    """Fetch a model's files and check them; without --files all that serve it, whose names and digests are printed."""

    url: CliPositionalArg[str] = Field(description="the model's folder")
    folder: CliPositionalArg[Path] = Field(description="where to put the files")
    files: dict[str, str] = Field({}, description="file name to SHA-256: these are fetched, and no others")


def main(arguments: list[str]) -> None:
    settings = load(FetchSettings, arguments, "tandem fetch")
    try:
        found = fetch(settings)
    except (OSError, ValueError) as error:
        raise SystemExit(f"tandem fetch: {error}") from None
    print(json.dumps({"files": found}, indent=2))


def fetch(settings: FetchSettings) -> dict[str, str]:
    """Returns the SHA-256 of each fetched file by name.

    Raises:
        OSError: a file cannot be read or written.
        ValueError: the URL is malformed, or a file has other bytes than it should.
    """
    names, get = _source(settings)
    wanted = list(settings.files or names())
    if not wanted:
        raise ValueError(f"there is no file at {settings.url}")
    missing = [name for name in wanted if not _is_whole(settings.folder / name, settings.files.get(name))]
    if missing:
        get(missing, settings.folder)
    for name in missing:
        _check(name, settings.folder, settings.files.get(name))
    return {name: _digest(settings.folder / name) for name in sorted(wanted)}


def _source(settings: FetchSettings) -> tuple[Names, Get]:
    if is_hub_name(settings.url):
        model = settings.url.removeprefix(HUB)
        return lambda: wanted_files(model, folder=settings.folder), partial(_get_from_hub, model)
    return _of_wheel(settings.url) if is_name(settings.url) else _of_store(settings.url)


def _of_wheel(model: str) -> tuple[Names, Get]:
    def get(names: list[str], folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for name in names:
            shutil.copy(find_model(model).path.with_name(name), _part(folder / name))
            _part(folder / name).rename(folder / name)

    return lambda: [find_model(model).path.name, *WHEELS[model].beside], get


def _get_from_hub(model: str, names: list[str], folder: Path) -> None:
    for name in names:  # remove damaged files, which would count as fetched
        (folder / name).unlink(missing_ok=True)
    fetch_files(model, names, folder)


def _of_store(url: str) -> tuple[Names, Get]:
    from obstore.fsspec import register  # only the loader's image has it

    register(("s3", "gs", "az"))
    source, root = fsspec.core.url_to_fs(url)

    def names() -> list[str]:
        return [name.removeprefix(root).strip("/") for name in source.find(root)]

    def get(names: list[str], folder: Path) -> None:
        parts = [_part(folder / name) for name in names]
        for part in parts:
            part.parent.mkdir(parents=True, exist_ok=True)
        source.get([f"{root}/{name}" for name in names], [str(part) for part in parts])
        for name, part in zip(names, parts, strict=True):
            part.rename(folder / name)

    return names, get


def _is_whole(path: Path, digest: str | None) -> bool:
    return digest is not None and path.is_file() and _digest(path) == digest


def _check(name: str, folder: Path, digest: str | None) -> None:
    if digest is not None and (found := _digest(folder / name)) != digest:
        (folder / name).unlink()
        raise ValueError(f"{name}: its SHA-256 is {found}, and should be {digest}")


def _part(path: Path) -> Path:
    return path.with_name(f".{path.name}.part")


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()
