"""The registry's answers "no"."""

from __future__ import annotations


class RegistryError(Exception):
    """Base of everything the registry raises on purpose."""


class RegistryUnavailable(RegistryError):
    """Redis cannot be reached, did not answer in time, or refuses writes. The call may or may not have taken effect."""


class ScriptFailed(RegistryUnavailable):
    """Redis answers, and has something that a script stumbles over, or was called with something wrong."""


class StaleIncarnation(RegistryError):
    """This incarnation was replaced or has left; it must stop serving under this worker id."""

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
    """No worker of the other role could pair with this one: its KV layout is none of theirs."""


class NoWorkers(RegistryError):
    """No worker can take the request now. The message names what is missing."""


class NoProvenLink(NoWorkers):
    """There are workers of both roles that could take it, and between none of them has KV moved yet."""


class RequestTooLarge(NoWorkers):
    """No live decode worker could hold the request even if it were idle: waiting does not help."""


# By what SELECT answers.
REFUSALS = {"too large": RequestTooLarge, "no link": NoProvenLink}
