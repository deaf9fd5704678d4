"""Answers of the registry, besides workers and routes."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, TypeAlias

from tandem.containment import Death
from tandem.registry.wire import UnreadableRows
from tandem.registry.worker import LiveWorker, decode


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
        found = {name: text for name, text in json.loads(said).items() if name in known}
        if not all(isinstance(text, str) for text in found.values()):
            raise ValueError("is no gateway's address")
        return cls(**found)


DIGITS = re.compile("[0-9]{1,15}")
# What a gateway has to do: of each class and tenant, the part of the cluster that it would fill.
Demand: TypeAlias = list[tuple[int, str, float]]
# Of each of its models, by name@fingerprint.
Demands: TypeAlias = dict[str, Demand]


def demands_of(said: str) -> Demands:
    """As a gateway wrote them.

    Raises:
        MISREAD: it wrote none.
    """
    found = json.loads(said)
    return {
        model: [(int(kind), str(tenant), float(part)) for kind, tenant, part in one] for model, one in found.items()
    }


def death_in(incarnation: str, said: str) -> Death | None:
    """As who knew it wrote it; None where nobody did.

    Raises:
        MISREAD: it is none.
    """
    if not said:
        return None
    cause, named = json.loads(said)
    return Death(incarnation, str(cause), {str(choice): int(count) for choice, count in named.items()})


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The live workers, by id. `epoch` changes when Redis has lost its memory; empty when it has none yet."""

    epoch: str
    workers: list[LiveWorker]

    @classmethod
    def of(cls, answer: Sequence[Any], unreadable: UnreadableRows) -> Snapshot:
        """As workers.lua answers."""
        epoch, mended, *flat = answer
        counts = zip(mended[::2], mended[1::2], strict=True)
        unreadable.note_mended({name: int(count) for name, count in counts if DIGITS.fullmatch(count)})
        rows = zip(flat[::2], flat[1::2], strict=True)
        found = unreadable.read_each("worker", ((name, partial(decode, name, row)) for name, row in rows))
        return cls(epoch, list(found.values()))
