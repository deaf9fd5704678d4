"""This gateway's share of the cluster among several, as if one gateway had all waiting work.

    demand    of each class and tenant: the part of the cluster that its work, inside or waiting, would fill
    given     to classes by weight, then to a class's tenants; to none more than its demand     fill
    here      a tenant's share is divided over the gateways as its demand is; what nobody asks for is everyone's alike

Gateways publish their demand when they renew their lease, so shares follow with that delay.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import nlargest
from itertools import chain
from operator import itemgetter
from typing import TypeVar

from services.gateway.admission.capacity import Capacity
from services.gateway.admission.fair_queue import Weights, Work
from services.gateway.admission.priority import PriorityClass
from tandem.registry import Demand

# The most tenants published, by demand.
MAX_TOLD = 256
K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Share:
    """`part`: of the cluster; of a class's and a tenant's share the part that belongs here, 1 if not named."""

    part: float = 1.0
    classes: Mapping[PriorityClass, float] = field(default_factory=dict)
    tenants: Mapping[tuple[PriorityClass, str], float] = field(default_factory=dict)


def demand_of(works: Iterable[Work], capacity: Capacity) -> Demand:
    """Returns the largest part of any resource that these works would fill, by class and tenant."""
    filled: defaultdict[tuple[int, str], float] = defaultdict(float)
    for work in works:
        filled[int(work.priority_class), work.tenant] += capacity.filled_by(work)
    most = nlargest(MAX_TOLD, filled.items(), key=itemgetter(1))
    return [(kind, tenant, round(amount, 6)) for (kind, tenant), amount in most]


def share_of(own: Demand, others: Sequence[Demand], weights: Weights) -> Share:
    """Returns the share of one gateway among all; alone it has everything."""
    if not others:
        return Share()
    demands: dict[PriorityClass, defaultdict[str, float]] = {}
    for kind, tenant, filled in chain(own, *others):
        demands.setdefault(PriorityClass(kind), defaultdict(float))[tenant] += filled
    by_class = fill(1.0, {kind: (weights.of_class(kind), sum(asked.values())) for kind, asked in demands.items()})
    given = {
        kind: fill(by_class[kind], {tenant: (weights.of_tenant(tenant), asked[tenant]) for tenant in asked})
        for kind, asked in demands.items()
    }
    tenants = {(PriorityClass(kind), name): filled / demands[PriorityClass(kind)][name] for kind, name, filled in own}
    here: defaultdict[PriorityClass, float] = defaultdict(float)
    for (kind, name), part in tenants.items():
        here[kind] += part * given[kind][name]
    spare = (1.0 - sum(by_class.values())) / (1 + len(others))
    classes = {kind: amount / by_class[kind] for kind, amount in here.items()}
    return Share(sum(here.values()) + spare, classes, tenants)


def fill(room: float, parties: Mapping[K, tuple[float, float]]) -> dict[K, float]:
    """Returns the room of each party (weight, demand): by weight, what one does not need going to the others."""
    given, weight_left = {}, sum(weight for weight, _ in parties.values())
    for name, (weight, demand) in sorted(parties.items(), key=lambda party: party[1][1] / party[1][0]):
        given[name] = min(demand, room * weight / weight_left)
        room -= given[name]
        weight_left -= weight
    return given
