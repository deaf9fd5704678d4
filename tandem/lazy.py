"""Imports a package's public names at their first use, so that code which needs only settings does not import torch."""

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any


def lazily(door: str, homes: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """Returns the `__getattr__` of a package whose names are imported at first use.

    Args:
        door: the package's name.
        homes: module of the package: the names that it has.
    """
    home_of = {name: home for home, names in homes.items() for name in names}

    def found(name: str) -> Any:
        if name not in home_of:
            raise AttributeError(f"module {door!r} has no attribute {name!r}")
        value = getattr(import_module(f"{door}.{home_of[name]}"), name)
        setattr(sys.modules[door], name, value)
        return value

    return found
