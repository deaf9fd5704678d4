"""Other releases in one namespace: their keys have another format, so neither routes to the other's workers."""

from __future__ import annotations

from dataclasses import dataclass

from tandem import __version__
from tandem.registry.wire import FORMAT, RegistryConnection

THIS_RELEASE = f"Tandem {__version__} (registry format {FORMAT})"


@dataclass(frozen=True, order=True, slots=True)
class OtherRelease:
    """Live leases of one of them."""

    format: int
    version: str  # of who registered last
    workers: int
    gateways: int

    def __str__(self) -> str:
        return (
            f"{self.workers} workers and {self.gateways} gateways of Tandem {self.version} (registry format "
            f"{self.format}) are in this namespace; this is {THIS_RELEASE}, which routes to none of them"
        )


class Releases:
    """The registry, as it is asked who else shares its namespace."""

    def __init__(self, connection: RegistryConnection) -> None:
        self._connection = connection

    async def others(self) -> list[OtherRelease]:
        """Those with another format, by format. Raises RegistryUnavailable."""
        found = await self._connection.call("releases")
        return sorted(OtherRelease(*one) for one in found)
