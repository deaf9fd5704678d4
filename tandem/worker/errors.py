"""Failures of sequences on a worker."""

from __future__ import annotations

from errno import EMFILE, ENFILE, ENOMEM


class SequenceFailed(Exception):
    """A sequence failed, or cannot begin. `code`: the name of a gRPC status."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


# How Python, torch and CUDA word the lack of a resource if they have no exception type for it.
_NO_ROOM = ("can't start new thread", "can't allocate memory", "not enough memory", "out of memory")


def lacks_room(error: BaseException) -> bool:
    """Returns True if memory, threads or descriptors ran out: the worker's fault, not the request's."""
    if isinstance(error, MemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno in (EMFILE, ENFILE, ENOMEM)
    return isinstance(error, RuntimeError) and any(said in str(error) for said in _NO_ROOM)
