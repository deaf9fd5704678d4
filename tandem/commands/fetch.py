"""`tandem fetch`: a model's files from wherever they are kept, checked byte for byte. It does so before a pod starts.

    hf://organisation/model@revision   s3://bucket/prefix   file:///folder   whatever else fsspec speaks

1 there    files that are whole already stay
2 fetch    the others, into names of their own
3 check    each file's SHA-256; then it gets its name
"""

from __future__ import annotations

import json
from hashlib import file_digest
from pathlib import Path

import fsspec
from pydantic import Field
from pydantic_settings import CliPositionalArg

from tandem.settings import Settings, load

WEIGHTS = (".safetensors", ".bin", ".gguf", ".pt", ".pth")


class FetchSettings(Settings):
    """Fetch a model's files and check them; without --files all of them, whose names and digests are then printed."""

    url: CliPositionalArg[str] = Field(description="the model's folder")
    folder: CliPositionalArg[Path] = Field(description="where to put the files")
    files: dict[str, str] = Field({}, description="file name to SHA-256: these are fetched, and no others")
    without_weights: bool = Field(False, description="only what a gateway needs: tokenizer, template, configuration")


def main(arguments: list[str]) -> None:
    settings = load(FetchSettings, arguments, "tandem fetch")
    try:
        found = fetch(settings)
    except (OSError, ValueError) as error:
        raise SystemExit(f"tandem fetch: {error}") from None
    print(json.dumps({"files": found}, indent=2))


def fetch(settings: FetchSettings) -> dict[str, str]:
    """Name and SHA-256 of each file that is there now.

    Raises:
        OSError: a file cannot be read or written.
        ValueError: the URL is malformed, or a file has other bytes than it should.
    """
    from obstore.fsspec import register  # only the loader's image has it

    register(("s3", "gs", "az"))
    source, root = fsspec.core.url_to_fs(settings.url)
    names = settings.files or [name.removeprefix(root).strip("/") for name in source.find(root)]
    wanted = [name for name in names if not (settings.without_weights and name.endswith(WEIGHTS))]
    if not wanted:
        raise ValueError(f"there is no file at {settings.url}")
    missing = [name for name in wanted if not _is_whole(settings.folder / name, settings.files.get(name))]
    parts = [_part(settings.folder / name) for name in missing]
    for part in parts:
        part.parent.mkdir(parents=True, exist_ok=True)
    if missing:
        source.get([f"{root}/{name}" for name in missing], [str(part) for part in parts])
    for name, part in zip(missing, parts, strict=True):
        _check(name, part, settings.files.get(name))
        part.rename(settings.folder / name)
    return {name: _digest(settings.folder / name) for name in sorted(wanted)}


def _is_whole(path: Path, digest: str | None) -> bool:
    return digest is not None and path.is_file() and _digest(path) == digest


def _check(name: str, part: Path, digest: str | None) -> None:
    if digest is not None and (found := _digest(part)) != digest:
        part.unlink()
        raise ValueError(f"{name}: its SHA-256 is {found}, and should be {digest}")


def _part(path: Path) -> Path:
    return path.with_name(f".{path.name}.part")


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()
