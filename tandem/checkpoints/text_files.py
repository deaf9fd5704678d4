"""The files that convert between a model's text and tokens: all that a gateway needs of a model, without weights.

    worker   text_fingerprint(folder), in its registration
    gateway  TextFiles.find(fingerprint) ──> the folder, if it has it already
             TextFiles.keep(files, fingerprint) ──> verified, and then found by `find`

The files are kept in <cache>/tandem/models/<fingerprint>; <cache>: XDG_CACHE_HOME or ~/.cache.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

from tandem.checkpoints.model_files import GENERATION_FILE, ContextFile, read_bytes, read_file
from tandem.machine.home import cache_folder

CONFIG = "config.json"
TOOL_TEMPLATE = "additional_chat_templates/tool_use.jinja"
TEXT_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", TOOL_TEMPLATE,
    GENERATION_FILE, CONFIG,
)  # fmt: skip
_FINGERPRINT = re.compile(r"[0-9a-f]{32}")
# Without these a gateway cannot serve a model.
NEEDED = ("tokenizer.json", CONFIG)
MAX_TEXT_BYTES = 128 * 2**20  # the most bytes of all files together


def text_file(folder: Path, name: str) -> bytes | None:
    """Returns one of TEXT_FILES; None if it is missing. config.json is reduced to the fields that concern text.

    Raises:
        OSError, ValueError: the file cannot be read.
    """
    if not (file := folder / name).is_file():
        return None
    return read_file(ContextFile, file).model_dump_json().encode() if name == CONFIG else read_bytes(file)


def text_fingerprint(folder: Path) -> str:
    """Returns the fingerprint of a folder's text files; empty if a required file is missing.

    Raises:
        OSError, ValueError: a file cannot be read.
    """
    if not all((folder / name).is_file() for name in NEEDED):
        return ""
    return _fingerprint({name: data for name in TEXT_FILES if (data := text_file(folder, name)) is not None})


def is_fingerprint(text: str) -> bool:
    """True if a text has the form of a fingerprint; registered texts may be anything."""
    return _FINGERPRINT.fullmatch(text) is not None


class TextFiles:
    """Text files of models on other machines, kept on this machine's disk. A folder is verified when it is found."""

    def __init__(self, cache: Path | None = None) -> None:
        self._cache = cache or _user_cache()

    def find(self, fingerprint: str) -> Path | None:
        if not is_fingerprint(fingerprint):
            return None
        folder = self._cache / fingerprint
        with suppress(OSError, ValueError):
            if text_fingerprint(folder) == fingerprint:
                return folder
        shutil.rmtree(folder, ignore_errors=True)
        return None

    def keep(self, files: Mapping[str, bytes], fingerprint: str) -> Path:
        """Keeps files and returns their folder.

        Raises:
            ValueError: the files do not have that fingerprint.
            OSError: the disk has no room for the files.
        """
        if not files.keys() <= set(TEXT_FILES) or _fingerprint(files) != fingerprint:
            raise ValueError(f"the files are not those of fingerprint {fingerprint}")
        try:
            self._cache.mkdir(parents=True, exist_ok=True)
            made = Path(tempfile.mkdtemp(prefix=".", dir=self._cache))
        except OSError:  # a read-only image: kept for this process alone
            self._cache = Path(tempfile.mkdtemp(prefix="tandem-models-"))
            made = Path(tempfile.mkdtemp(prefix=".", dir=self._cache))
        try:
            for name, data in files.items():
                (made / name).parent.mkdir(exist_ok=True)
                (made / name).write_bytes(data)
            with suppress(OSError):  # another process has just kept the same files
                made.rename(self._cache / fingerprint)
        finally:
            shutil.rmtree(made, ignore_errors=True)
        return self._cache / fingerprint


def _fingerprint(files: Mapping[str, bytes]) -> str:
    digests = "\n".join(f"{name}:{sha256(data).hexdigest()}" for name, data in sorted(files.items()))
    return sha256(digests.encode()).hexdigest()[:32]


def _user_cache() -> Path:
    return cache_folder("models")
