"""The models that a gateway serves, each an LLM, by name. All rooms of the gateway may enter.

A model without workers is woken when a client asks for it, and leaves when its workers do.
"""

from services.gateway.directory.directory import AskedIn, Listed, ModelDirectory
from services.gateway.directory.llm import LLM
from services.gateway.directory.on_demand import Asleep, Sleepers
from services.gateway.directory.readiness import of_gateway
from services.gateway.directory.roster import ReadModel, Roster
from services.gateway.directory.versions import mixed, shares

__all__ = [
    "LLM",
    "AskedIn",
    "Asleep",
    "Listed",
    "ModelDirectory",
    "ReadModel",
    "Roster",
    "Sleepers",
    "mixed",
    "of_gateway",
    "shares",
]
