"""Other releases of Tandem in the same namespace. Their keys have another format, so neither routes to the other's."""

from __future__ import annotations

from dataclasses import dataclass

from tandem import __version__
from tandem.registry.wire import FORMAT, RegistryConnection

THIS_RELEASE = f"Tandem {__version__} (registry format {FORMAT})"


@dataclass(frozen=True, order=True, slots=True)
class OtherRelease:
    """The number of live leases of another release."""

    format: int
    version: str  # the version of the last process that registered with this format
    workers: int
    gateways: int

    def __str__(self) -> str:
        return (
            f"{self.workers} workers and {self.gateways} gateways of Tandem {self.version} (registry format "
            f"{self.format}) are in this namespace; this is {THIS_RELEASE}, which routes to none of them"
        )


class Releases:
    """Finds the other releases that share the registry's namespace."""

    def __init__(self, connection: RegistryConnection) -> None:
        self._connection = connection

    async def others(self) -> list[OtherRelease]:
        """Returns the other releases, by format. Raises RegistryUnavailable."""
        found = await self._connection.call("releases")
        return sorted(OtherRelease(*one) for one in found)
