"""How a sequence fails on a worker."""

from __future__ import annotations


class SequenceFailed(Exception):
    """A sequence has ended, or cannot begin. `code`: a gRPC status name."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
