"""The files by which a model's text becomes tokens and tokens text: all that a gateway needs of it, and no weights.

    worker   text_digests(folder) ──> fingerprint_of(digests), in its registration
    gateway  TextFiles.find(fingerprint) ──> the folder that it has already
             TextFiles.keep(files, fingerprint) ──> verified, and found from then on

What is kept lies in <cache>/tandem/models/<fingerprint>, the cache being XDG_CACHE_HOME or ~/.cache.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

from tandem.checkpoints.model_files import GENERATION_FILE, read_bytes

TEXT_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", GENERATION_FILE, "config.json")
# Without these a gateway cannot serve a model.
NEEDED = ("tokenizer.json", "config.json")
MAX_TEXT_BYTES = 128 * 2**20  # of all of them


def text_digests(folder: Path) -> tuple[str, ...]:
    """Name and digest, name:digest, of each of TEXT_FILES that is there; none where a needed one is not.

    Raises:
        OSError, ValueError: a file cannot be read.
    """
    found = [file for name in TEXT_FILES if (file := folder / name).is_file()]
    if not {file.name for file in found}.issuperset(NEEDED):
        return ()
    return tuple(_digest(file.name, read_bytes(file)) for file in found)


def fingerprint_of(digests: Sequence[str]) -> str:
    """The name of those files together; empty where there are none."""
    return sha256("\n".join(sorted(digests)).encode()).hexdigest()[:32] if digests else ""


def differing(ours: Sequence[str], theirs: Sequence[str]) -> list[str]:
    """Names of what differs between two folders' `text_digests`; of a folder that has none, nothing is known."""
    known = set(ours) ^ set(theirs) if ours and theirs else set()
    return sorted({digest.partition(":")[0] for digest in known})


class TextFiles:
    """Those of other machines' models, kept on this one's disk. Damage is noticed: a folder is verified when found."""

    def __init__(self, cache: Path | None = None) -> None:
        self._cache = cache or _user_cache()

    def find(self, fingerprint: str) -> Path | None:
        folder = self._cache / fingerprint
        with suppress(OSError, ValueError):
            if fingerprint and fingerprint_of(text_digests(folder)) == fingerprint:
                return folder
        shutil.rmtree(folder, ignore_errors=True)
        return None

    def keep(self, files: Mapping[str, bytes], fingerprint: str) -> Path:
        """
        Raises:
            ValueError: they are not the files of that fingerprint.
            OSError: there is no room for them.
        """
        digests = [_digest(name, data) for name, data in files.items()]
        if not files.keys() <= set(TEXT_FILES) or fingerprint_of(digests) != fingerprint:
            raise ValueError(f"the files are not those of fingerprint {fingerprint}")
        try:
            self._cache.mkdir(parents=True, exist_ok=True)
            made = Path(tempfile.mkdtemp(prefix=".", dir=self._cache))
        except OSError:  # an image that nobody may write to: for this process alone
            self._cache = Path(tempfile.mkdtemp(prefix="tandem-models-"))
            made = Path(tempfile.mkdtemp(prefix=".", dir=self._cache))
        try:
            for name, data in files.items():
                (made / name).write_bytes(data)
            with suppress(OSError):  # another process has just kept the same
                made.rename(self._cache / fingerprint)
        finally:
            shutil.rmtree(made, ignore_errors=True)
        return self._cache / fingerprint


def _digest(name: str, data: bytes) -> str:
    return f"{name}:{sha256(data).hexdigest()}"


def _user_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tandem" / "models"
