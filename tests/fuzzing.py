"""Examples of a strategy, the same each time: for fuzz tests that send them by themselves."""

from __future__ import annotations

from typing import TypeVar

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

T = TypeVar("T")


def collected(strategy: st.SearchStrategy[T], count: int = 60) -> list[T]:
    found: list[T] = []

    @settings(max_examples=count, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(strategy)
    def collect(example: T) -> None:
        found.append(example)

    collect()
    return found
