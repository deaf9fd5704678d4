"""How a sequence fails on a worker."""

from __future__ import annotations

from errno import EMFILE, ENFILE, ENOMEM


class SequenceFailed(Exception):
    """A sequence has ended, or cannot begin. `code`: a gRPC status name."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


# How Python, torch and CUDA name it where they have no type for it.
_NO_ROOM = ("can't start new thread", "can't allocate memory", "not enough memory", "out of memory")


def lacks_room(error: BaseException) -> bool:
    """Return whether memory, threads or descriptors ran out: that is the worker's fault, whatever the request."""
    if isinstance(error, MemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno in (EMFILE, ENFILE, ENOMEM)
    return isinstance(error, RuntimeError) and any(said in str(error) for said in _NO_ROOM)
