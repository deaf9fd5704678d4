"""Quantities of a cluster file as numbers: times, and resources as Kubernetes writes them."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

UNITS: dict[str, Fraction | int] = {"": 1, "m": Fraction(1, 1000), "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
UNITS |= {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
TIMES = {"": 1, "s": 1, "m": 60, "h": 3600}


def seconds_of(said: Any) -> Any:
    """Returns 90, 90s, 10m or 1h as seconds; anything else unchanged, for the schema to refuse."""
    text = str(said)
    number = text.rstrip("smh")
    unit = TIMES.get(text.removeprefix(number))
    try:
        return float(number) * unit if unit else said
    except ValueError:
        return said


def amount_of(name: str, value: str | float) -> float:
    """Returns 0.5 for 500m, and 2048 for 2Ki.

    Raises:
        ValueError: it is no quantity of the resource `name`.
    """
    text = str(value)
    number = text.rstrip("mkMGTi")
    try:
        return float(Fraction(number) * UNITS[text.removeprefix(number)])
    except (KeyError, ValueError):
        raise ValueError(f"{name}: {value!r} is not a quantity such as 2, 500m or 4Gi") from None
