"""Imports what a room's door offers when it is asked for: nobody waits seconds for torch who wants settings."""

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any


def lazily(door: str, homes: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """A module's `__getattr__`.

    Args:
        door: the module's name.
        homes: the names that each of its modules has.
    """
    home_of = {name: home for home, names in homes.items() for name in names}

    def found(name: str) -> Any:
        if name not in home_of:
            raise AttributeError(f"module {door!r} has no attribute {name!r}")
        value = getattr(import_module(f"{door}.{home_of[name]}"), name)
        setattr(sys.modules[door], name, value)
        return value

    return found
