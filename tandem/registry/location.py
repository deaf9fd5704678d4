"""The place where a worker runs, and how far KV goes between two: near costs less, if nothing else is measured."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple


class Distance(IntEnum):
    """The distance of two workers; each has a measured rate of its own."""

    NEAR = 0
    ZONE = 1
    FAR = 2


class Location(NamedTuple):
    """Names alone count; empty ones are those of everybody who has none."""

    node: str
    nvlink_domain: str
    zone: str

    def distance_to(self, other: Location) -> Distance:
        """As tandem/registry/lua/costs.lua sees it."""
        if self.node == other.node or (self.nvlink_domain and self.nvlink_domain == other.nvlink_domain):
            return Distance.NEAR
        return Distance.ZONE if self.zone == other.zone else Distance.FAR

    def way_to(self, other: Location) -> str:
        """Says in words what they have in common."""
        if self.node == other.node:
            return "one machine"
        if self.distance_to(other) is Distance.NEAR:
            return "one NVLink domain"
        return "one zone" if self.zone == other.zone else "two zones"
