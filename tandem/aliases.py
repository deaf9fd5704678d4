"""Aliases: names under which one of several models answers, by weights. No torch.

    fast=smollm2:0.9,smollm2-int4:0.1,demo:fallback       nine of ten users get smollm2; demo only if both are gone

An alias's targets are models and adapters, never aliases: so there are no cycles, and an alias may have the name of one
of its models.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal

NAME = re.compile(r"[\w][\w./:@+-]{0,255}")
FALLBACK: Literal["fallback"] = "fallback"
# The most targets of one alias, and the most aliases of one cluster.
MOST_TARGETS, MOST_ALIASES = 16, 256
MOST_WEIGHT = 1e6
# Model or adapter: its weight relative to the others, or "fallback": it answers only if no target before it has
# workers.
Targets = Mapping[str, float | Literal["fallback"]]


@dataclass(frozen=True, slots=True)
class Alias:
    name: str
    targets: Targets

    def __post_init__(self) -> None:
        """Checks the alias.

        Raises:
            ValueError: what is wrong, in one line.
        """
        for name in (self.name, *self.targets):
            if not NAME.fullmatch(name):
                raise ValueError(f"{_shown(name)} is no name: letters, digits and ./:@+-_, at most 256 of them")
        if not self.weights or len(self.targets) > MOST_TARGETS:
            raise ValueError(f"alias {self.name}: 1 to {MOST_TARGETS} models, at least one of them with a weight")
        for name, weight in self.weights.items():
            if not 0 < weight <= MOST_WEIGHT:  # also refuses nan
                raise ValueError(f"alias {self.name}: weight of {name} must be above 0 and at most 1e6, got {weight}")

    @classmethod
    def parse(cls, text: str) -> Alias:
        """Parses `fast=smollm2:0.9,smollm2-int4:0.1,demo:fallback`; a model without a weight has weight 1.

        Raises:
            ValueError: what is wrong, in one line.
        """
        name, _, said = text.partition("=")
        targets: dict[str, float | Literal["fallback"]] = {}
        for part in said.split(","):
            model, weight = _target(part)
            if model in targets:
                raise ValueError(f"alias {_shown(name)}: {_shown(model)} is there twice")
            targets[model] = weight
        return cls(name, targets)

    @property
    def weights(self) -> dict[str, float]:
        return {name: weight for name, weight in self.targets.items() if weight != FALLBACK}

    @property
    def fallbacks(self) -> list[str]:
        return [name for name, weight in self.targets.items() if weight == FALLBACK]

    @property
    def shares(self) -> dict[str, float]:
        """The part of the users that each target gets while all targets have workers."""
        whole = sum(self.weights.values())
        return {name: round(weight / whole, 6) for name, weight in self.weights.items()}

    def choose(self, user: str, serves: Callable[[str], bool]) -> str | None:
        """Returns the target for a user among those that serve: the same each time, at each gateway. It changes only as
        far as weights change, or when the user's target is gone. None: no target serves.
        """
        serving = {name: weight for name, weight in self.weights.items() if serves(name)}
        if serving:  # weighted rendezvous hashing: the target with the shortest drawn time gets the user
            return min(serving, key=lambda name: -math.log(self._drawn(name, user)) / serving[name])
        return next(filter(serves, self.fallbacks), None)

    def _drawn(self, target: str, user: str) -> float:
        """Returns a pseudo-random number of the target and the user, above 0 and at most 1."""
        digest = blake2b(f"{self.name}\0{target}\0{user}".encode(errors="replace"), digest_size=7).digest()
        return (int.from_bytes(digest) + 1) / 2**56


def text_of_alias(alias: Alias) -> str:
    """Returns an alias as text for the registry."""
    return json.dumps(dict(alias.targets))


def _target(part: str) -> tuple[str, float | Literal["fallback"]]:
    """Parses one target. A model's own name may contain a colon, too."""
    model, colon, said = part.rpartition(":")
    if colon and said == FALLBACK:
        return model, FALLBACK
    try:
        return (model, float(said)) if colon else (part, 1.0)
    except ValueError:
        return part, 1.0


def _shown(name: str) -> str:
    return repr(name if len(name) <= 80 else f"{name[:80]}…")
