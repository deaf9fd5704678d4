"""A service of a cluster, as any launcher runs it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Service:
    """`python -m module` with `settings`, and `environment` for what they leave open."""

    name: str
    module: str
    settings: Mapping[str, object]
    threads: int = 1
    resources: Mapping[str, float] = field(default_factory=dict)  # what a machine must have for it
    environment: Mapping[str, str] = field(default_factory=dict)  # the only variables of settings that it sees
