"""Answers of the registry, besides workers and routes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import TypeAlias

from tandem.adapters import AdapterRef
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


@dataclass(frozen=True, slots=True)
class Adapters:
    """By name; `epoch` as in Snapshot."""

    epoch: str
    by_name: dict[str, AdapterRef]

    @classmethod
    def of(cls, answer: tuple[str, Sequence[str]]) -> Adapters:
        epoch, flat = answer
        texts = zip(flat[::2], flat[1::2], strict=True)
        return cls(epoch, {name: AdapterRef(name, *json.loads(text)[:3]) for name, text in texts})


def text_of_adapter(ref: AdapterRef) -> str:
    """As Redis keeps it."""
    return json.dumps([ref.path, ref.revision, ref.model])
