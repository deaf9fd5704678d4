"""Conversion of times to the milliseconds that scripts take."""

from __future__ import annotations


def milliseconds(seconds: float) -> int:
    """Returns whole milliseconds, at least one.

    Raises:
        ValueError: `seconds` is no time to live.
    """
    if seconds <= 0:
        raise ValueError(f"ttl must be above 0 seconds, got {seconds}")
    return max(1, round(seconds * 1000))
