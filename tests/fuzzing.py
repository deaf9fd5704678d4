"""How much fuzz tests try: ten times as much in `make check PART=security`; the same examples each time."""

from __future__ import annotations

from typing import TypeVar

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

T = TypeVar("T")
SHORT = 100  # max_examples of hypothesis' own profile


def fuzzed(count: int) -> settings:
    """So many examples; more under the profile `guard`."""
    return settings(
        max_examples=count * settings().max_examples // SHORT,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )


def collected(strategy: st.SearchStrategy[T], count: int = 60) -> list[T]:
    """Examples for a test that sends them by itself."""
    found: list[T] = []

    @fuzzed(count)
    @given(strategy)
    def collect(example: T) -> None:
        found.append(example)

    collect()
    return found
