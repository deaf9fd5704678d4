"""The steps of the Dockerfile, stage by stage."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "deploy" / "docker" / "Dockerfile"


@dataclass
class Stage:
    parent: str
    steps: list[Any]


def stages() -> tuple[dict[str, Stage], dict[str, str]]:
    """By name, and the arguments that stand before the first of them."""
    import dockerfile

    found: dict[str, Stage] = {}
    arguments: dict[str, str] = {}
    for step in dockerfile.parse_file(str(DOCKERFILE)):
        if step.cmd.upper() == "FROM":
            parent, _, name = step.value
            stage = found[name] = Stage(_expanded(parent, arguments), [])
        elif not found:
            name, _, default = step.value[0].partition("=")
            arguments[name] = default
        else:
            stage.steps.append(step)
    return found, arguments


def _expanded(text: str, arguments: dict[str, str]) -> str:
    return re.sub(r"\$\{(\w+)\}", lambda name: arguments[name[1]], text)
