"""Errors of the registry."""

from __future__ import annotations


class RegistryError(Exception):
    """Base of the registry's errors."""


class RegistryUnavailable(RegistryError):
    """Redis cannot be reached, did not answer in time, or refuses writes. The call may or may not have taken effect."""


class ScriptFailed(RegistryUnavailable):
    """Redis answers, but a script failed: on a wrong value in Redis, or on a wrong argument."""


class StaleIncarnation(RegistryError):
    """This incarnation was replaced or has deregistered; it must stop serving under its worker id."""

    def __init__(self, worker_id: str, incarnation: str) -> None:
        super().__init__(f"incarnation {incarnation} of worker {worker_id} was replaced or has left")
        self.worker_id = worker_id
        self.incarnation = incarnation


class WorkerIdTaken(RegistryError, ValueError):
    """Another worker of this id holds a lease, which ends in `ends_in_s` unless it is renewed."""

    def __init__(self, message: str, ends_in_s: float) -> None:
        super().__init__(message)
        self.ends_in_s = ends_in_s


class IncompatibleLayout(RegistryError, ValueError):
    """No worker of the other role could pair with this one: they all have another KV layout."""


class NoWorkers(RegistryError):
    """No worker can take the request now. The message says what is missing."""


class NoProvenLink(NoWorkers):
    """Workers of both roles could take the request, but no pair of them has moved KV yet."""


class RequestTooLarge(NoWorkers):
    """No live decode worker could hold the request even if it were idle: waiting does not help."""


# The error for each status that select.lua answers.
REFUSALS = {"too large": RequestTooLarge, "no link": NoProvenLink}
