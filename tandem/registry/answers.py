"""Answers of the registry that are not workers or routes."""

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
    """Numbers of expired leases, reservations and block locations, and of the leases and reservations that live."""

    leases: int
    reservations: int
    blocks: int
    live_leases: int = field(default=0, compare=False)
    live_reservations: int = field(default=0, compare=False)

    def then(self, other: Swept) -> Swept:
        """Returns the sum of what two sweeps ended. What lives is the later one's (`other`)."""
        ended = self.leases + other.leases, self.reservations + other.reservations, self.blocks + other.blocks
        return Swept(*ended, other.live_leases, other.live_reservations)


@dataclass(frozen=True, order=True, slots=True)
class GatewayAddress:
    """Addresses at which clients reach a gateway, host:port each. `model`: its models' names, joined by ", "."""

    model: str
    http: str
    grpc: str
    own_http: str = ""  # this process's own address, if other processes share `http`

    @classmethod
    def of(cls, said: str) -> GatewayAddress:
        """Parses what a gateway wrote. Fields of a newer version are ignored."""
        known = {field.name for field in fields(cls)}
        found = {name: text for name, text in json.loads(said).items() if name in known}
        if not all(isinstance(text, str) for text in found.values()):
            raise ValueError("is no gateway's address")
        return cls(**found)


DIGITS = re.compile("[0-9]{1,15}")
# A gateway's demand for one model: (class, tenant, the part of the cluster that their requests would fill), ...
Demand: TypeAlias = list[tuple[int, str, float]]
# A gateway's demand for each of its models, by name@fingerprint.
Demands: TypeAlias = dict[str, Demand]


def demands_of(said: str) -> Demands:
    """Parses a gateway's demands.

    Raises:
        MISREAD: the text is malformed.
    """
    found = json.loads(said)
    return {
        model: [(int(kind), str(tenant), float(part)) for kind, tenant, part in one] for model, one in found.items()
    }


def death_in(incarnation: str, said: str) -> Death | None:
    """Parses the report of an incarnation's death; None if the text is empty, as no death was reported.

    Raises:
        MISREAD: the text is malformed.
    """
    if not said:
        return None
    cause, named = json.loads(said)
    return Death(incarnation, str(cause), {str(choice): int(count) for choice, count in named.items()})


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The live workers, by id. `epoch` changes when Redis has lost its data; empty while Redis is empty."""

    epoch: str
    workers: list[LiveWorker]

    @classmethod
    def of(cls, answer: Sequence[Any], unreadable: UnreadableRows) -> Snapshot:
        """Parses the answer of workers.lua."""
        epoch, mended, *flat = answer
        counts = zip(mended[::2], mended[1::2], strict=True)
        unreadable.note_mended({name: int(count) for name, count in counts if DIGITS.fullmatch(count)})
        rows = zip(flat[::2], flat[1::2], strict=True)
        found = unreadable.read_each("worker", ((name, partial(decode, name, row)) for name, row in rows))
        return cls(epoch, list(found.values()))
