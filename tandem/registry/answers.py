"""Answers of the registry, besides workers and routes."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields
from typing import TypeAlias

from tandem.registry.worker import LiveWorker


@dataclass(frozen=True, slots=True)
class Swept:
    """How much was past its time, and how much is not."""

    leases: int
    reservations: int
    blocks: int
    live_leases: int = field(default=0, compare=False)
    live_reservations: int = field(default=0, compare=False)

    def then(self, other: Swept) -> Swept:
        """Both together, as of the other."""
        ended = self.leases + other.leases, self.reservations + other.reservations, self.blocks + other.blocks
        return Swept(*ended, other.live_leases, other.live_reservations)


@dataclass(frozen=True, order=True, slots=True)
class GatewayAddress:
    """Addresses at which clients reach a gateway, host:port each. `model`: all that it serves, ", " between."""

    model: str
    http: str
    grpc: str
    own_http: str = ""  # of this process alone, where others share `http`

    @classmethod
    def of(cls, said: str) -> GatewayAddress:
        """As a gateway wrote it, which may be of a newer version and say more."""
        known = {field.name for field in fields(cls)}
        return cls(**{name: text for name, text in json.loads(said).items() if name in known})


# What a gateway has to do: of each class and tenant, the part of the cluster that it would fill.
Demand: TypeAlias = list[tuple[int, str, float]]
# Of each of its models, by name@fingerprint.
Demands: TypeAlias = dict[str, Demand]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The live workers, by id. `epoch` changes when Redis has lost its memory; empty when it has none yet."""

    epoch: str
    workers: list[LiveWorker]
