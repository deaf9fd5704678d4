"""A worker's location, and the distance of two workers: a short distance costs less until rates are measured."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple


class Distance(IntEnum):
    """The distance of two workers. Workers measure one transfer rate per distance."""

    NEAR = 0
    ZONE = 1
    FAR = 2


class Location(NamedTuple):
    """A worker's location, by names: equal names are the same place. An empty node or zone equals another empty one;
    "": no NVLink domain.
    """

    node: str
    nvlink_domain: str
    zone: str

    def distance_to(self, other: Location) -> Distance:
        """Returns the distance to `other`, by the rules of lua/costs.lua."""
        if self.node == other.node or (self.nvlink_domain and self.nvlink_domain == other.nvlink_domain):
            return Distance.NEAR
        return Distance.ZONE if self.zone == other.zone else Distance.FAR

    def way_to(self, other: Location) -> str:
        """Describes in words what two locations have in common."""
        if self.node == other.node:
            return "one machine"
        if self.distance_to(other) is Distance.NEAR:
            return "one NVLink domain"
        return "one zone" if self.zone == other.zone else "two zones"
