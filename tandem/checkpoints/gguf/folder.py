"""Conversion of a GGUF file to a Hugging Face folder, made once and kept in the cache.

1 name     by the file's path, size and time of change: another file is another folder
2 read     metadata and each tensor's place; no weights. A generation_config.json beside the file takes precedence; a
           tokenizer_config.json there may name the format of tool calls
3 write    into a temporary folder, which is then renamed: concurrent processes end with the same folder
"""

from __future__ import annotations

import json
import math
import os
import struct
import tempfile
from hashlib import blake2b
from pathlib import Path
from typing import Any

from tandem.checkpoints.gguf.config import FREQUENCIES, config_of, generation_of
from tandem.checkpoints.gguf.metadata import Metadata
from tandem.checkpoints.gguf.reader import GgufTensor, read_gguf
from tandem.checkpoints.model_files import (
    GENERATION_FILE,
    TOKENIZER_CONFIG,
    CallsFile,
    GenerationFile,
    ModelFile,
    read_file,
)
from tandem.machine.home import cache_folder

SUFFIX = ".gguf"
WEIGHTS_FILE, TENSORS_FILE = "model.gguf", "tensors.json"
TYPES = frozenset({"F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"})
MOST_FREQUENCY_BYTES = 2**16
_VERSION = b"3"  # format of the folders that are written


def folder_of(file: Path, cache: Path | None = None) -> Path:
    """Returns the model's folder, made on the first call for this file.

    Raises:
        OSError: the file cannot be read, or the cache not written.
        ValueError: the file is no GGUF file, or cannot be served; the error names the file and the key.
    """
    generation, calls = _beside(file, GENERATION_FILE, GenerationFile), _beside(file, TOKENIZER_CONFIG, CallsFile)
    name, file = file.stem, file.resolve()  # in a hub's cache the file is a link to a file without a name
    said = file.stat()
    cache = _writable(cache or cache_folder("gguf"))
    naming = f"{file}\0{said.st_size}\0{said.st_mtime_ns}\0{generation}{calls or ''}".encode() + _VERSION
    place = cache / blake2b(naming, digest_size=8).hexdigest() / name
    if not (place / TENSORS_FILE).is_file():
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=place.parent) as made:
            _write(file, Path(made) / "model", generation, calls)
            if not place.exists():
                os.rename(Path(made) / "model", place)
    return place


def as_folder(path: Path) -> Path:
    """Returns a model's folder unchanged; for a GGUF file, or a folder with only a GGUF file, the folder made of it.

    Raises:
        ValueError: the file cannot be read or served.
    """
    if path.is_dir() and not (path / "config.json").exists() and len(files := list(path.glob(f"*{SUFFIX}"))) == 1:
        path = files[0]
    if path.suffix != SUFFIX or path.is_dir():
        return path
    try:
        return folder_of(path)
    except OSError as error:
        raise ValueError(str(error)) from None


def _writable(cache: Path) -> Path:
    """Returns the cache if it is writable, else a folder of this process alone, as in a read-only image."""
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError:
        return Path(tempfile.mkdtemp(prefix="tandem-gguf-"))
    return cache if os.access(cache, os.W_OK) else Path(tempfile.mkdtemp(prefix="tandem-gguf-"))


def _beside(file: Path, name: str, kind: type[ModelFile]) -> dict[str, Any]:
    """Returns the fields of the file of that name beside the GGUF file, if there is one.

    Raises:
        ValueError: the file is malformed.
    """
    beside = file.with_name(name)
    return read_file(kind, beside).model_dump(exclude_none=True) if beside.is_file() else {}


def _write(file: Path, folder: Path, generation: dict[str, Any], calls: dict[str, Any]) -> None:
    from tandem.checkpoints.gguf.tokenizer import (  # not every process that uses this module has the library
        special_tokens_of,
        tokenizer_of,
    )

    metadata, tensors = _read(file)
    kinds = {tensor.type for tensor in tensors.values()}
    if kinds - TYPES:
        raise ValueError(f"{file}: tensors of {', '.join(sorted(kinds - TYPES))}; known: {', '.join(sorted(TYPES))}")
    factor = _frequency_factor(tensors.get(FREQUENCIES), file)
    written = {
        "config.json": config_of(metadata, factor, kinds == {"F32"}),
        GENERATION_FILE: generation_of(metadata) | generation,
        TOKENIZER_CONFIG: special_tokens_of(metadata) | _template(metadata) | calls,
        TENSORS_FILE: {
            name: {"type": tensor.type, "shape": list(reversed(tensor.shape)), "offset": tensor.offset,
                   "nbytes": tensor.nbytes}
            for name, tensor in tensors.items() if name != FREQUENCIES
        },
    }  # fmt: skip
    tokenizer = tokenizer_of(metadata)
    folder.mkdir()
    for name, content in written.items():
        (folder / name).write_text(json.dumps(content, indent=1), encoding="utf-8")
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / WEIGHTS_FILE).symlink_to(file)


def _read(file: Path) -> tuple[Metadata, dict[str, GgufTensor]]:
    try:
        values, tensors = read_gguf(file)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
    by_name = {tensor.name: tensor for tensor in tensors}
    return Metadata(file, values, frozenset(by_name)), by_name


def _template(metadata: Metadata) -> dict[str, Any]:
    """Returns the chat template in tokenizer_config.json's form: with one for tools, a list of two."""
    template = metadata.get("tokenizer.chat_template", str)
    for_tools = metadata.get("tokenizer.chat_template.tool_use", str)
    named = {"default": template, "tool_use": for_tools}
    if template and for_tools:
        return {"chat_template": [{"name": name, "template": source} for name, source in named.items()]}
    return {"chat_template": template} if template else {}


def _frequency_factor(tensor: GgufTensor | None, file: Path) -> float | None:
    if tensor is None:
        return None
    if tensor.type != "F32" or not 0 < tensor.nbytes <= MOST_FREQUENCY_BYTES:
        raise ValueError(f"{file}: {FREQUENCIES}: {tensor.shape} of {tensor.type} are no factors of frequencies")
    with file.open("rb") as opened:
        opened.seek(tensor.offset)
        factor: float = max(struct.unpack(f"<{tensor.nbytes // 4}f", opened.read(tensor.nbytes)))
    if not math.isfinite(factor) or factor < 1:
        raise ValueError(f"{file}: {FREQUENCIES}: {factor} is no factor of frequencies")
    return factor
