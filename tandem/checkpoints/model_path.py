"""The setting that names a service's model: a folder, a GGUF file, or a name by which this machine fetches it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator

from tandem.checkpoints.gguf import as_folder
from tandem.checkpoints.hub import local_path

ModelPath = Annotated[Path, BeforeValidator(local_path), AfterValidator(as_folder)]
