"""Cases that `make test` leaves to `make check`."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import pytest


def long_but(kept: Container[Any], cases: Iterable[Any]) -> list[Any]:
    """The cases, all but the kept ones marked as long."""
    return [case if case in kept else pytest.param(case, marks=pytest.mark.long) for case in cases]
