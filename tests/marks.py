"""Cases that `make test` leaves to `make check`."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import pytest


def long_but(kept: Container[Any], cases: Iterable[Any]) -> list[Any]:
    """The cases, all but the kept ones marked as long."""
    return [case if case in kept else _long(case) for case in cases]


def _long(case: Any) -> Any:
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.long)
