"""A service of a cluster, for any launcher."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Service:
    """The command `python -m module` with `settings`, and with `environment` for what they leave open."""

    name: str
    module: str
    settings: Mapping[str, object]
    threads: int = 1
    resources: Mapping[str, float] = field(default_factory=dict)  # the resources that its machine must have
    # The only environment variables of settings that it gets.
    environment: Mapping[str, str] = field(default_factory=dict)
