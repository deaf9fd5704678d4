"""The rule by which a model makes one vector of a text, from sentence-transformers' files in its folder."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.checkpoints.model_files import read_bytes

MODULES = "modules.json"
KINDS = {"lasttoken": "last", "mean_tokens": "mean", "cls_token": "cls"}
KNOWN = ("Transformer", "Pooling", "Normalize")


@dataclass(frozen=True, slots=True)
class PoolingRule:
    """A pooling rule. `kind`: the `last` hidden state after the final norm, the first (`cls`), or their `mean`."""

    kind: str = "last"
    normalizes: bool = True


def read_pooling(folder: Path) -> PoolingRule:
    """Reads a folder's pooling rule. Default: the last state, normalized to length 1.

    Raises:
        ValueError: the folder's rule is not supported.
    """
    file = folder / MODULES
    if not file.is_file():
        return PoolingRule()
    modules = _parsed(file, list)
    kinds = [str(module.get("type", "")).rpartition(".")[2] for module in modules if isinstance(module, dict)]
    if len(kinds) < len(modules) or (unknown := sorted(set(kinds) - set(KNOWN))):
        raise ValueError(f"{file}: only {', '.join(KNOWN)} are known, not {', '.join(unknown) if kinds else modules!r}")
    places = [module.get("path") for module, kind in zip(modules, kinds, strict=True) if kind == "Pooling"]
    if len(places) != 1 or not isinstance(places[0], str) or Path(places[0]).name != places[0]:
        raise ValueError(f"{file}: one Pooling with the path of a folder is wanted")
    return PoolingRule(_kind_of(folder / places[0] / "config.json"), "Normalize" in kinds)


def _kind_of(file: Path) -> str:
    said = _parsed(file, dict)
    modes = [name.removeprefix("pooling_mode_") for name, on in said.items() if name.startswith("pooling_mode_") and on]
    if isinstance(said.get("pooling_mode"), str):
        modes = [{"mean": "mean_tokens", "cls": "cls_token"}.get(said["pooling_mode"], said["pooling_mode"])]
    if len(modes) != 1 or modes[0] not in KINDS:
        raise ValueError(f"{file}: one pooling mode of {', '.join(KINDS)} is wanted, got {', '.join(modes) or 'none'}")
    return KINDS[modes[0]]


def _parsed(file: Path, kind: type) -> Any:
    try:
        found = json.loads(read_bytes(file))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{file}: {error}") from None
    if not isinstance(found, kind):
        raise ValueError(f"{file}: a {kind.__name__} is wanted")
    return found
