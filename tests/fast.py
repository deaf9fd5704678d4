"""Holds tests to what `make fast` may run: no torch, no other process, so that an edit is answered within a minute.

    pytest -p tests.fast FILES      anything else fails and says which of the two it wanted

A file says that it belongs here by `pytestmark = pytest.mark.fast`.
"""

from __future__ import annotations

import subprocess
import sys
from importlib.machinery import ModuleSpec
from typing import Any, NoReturn

HEAVY = {"torch", "transformers", "cupy", "ray"}


class _NoHeavyModules:
    """First of the import system's finders."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name.partition(".")[0] in HEAVY:
            raise ImportError(f"{name} is not imported by tests that are marked fast")
        return None


def _refuse(self: object, arguments: Any, *_: object, **__: object) -> NoReturn:
    raise RuntimeError(f"tests that are marked fast start no process: {arguments}")


def pytest_configure() -> None:
    sys.meta_path.insert(0, _NoHeavyModules())  # type: ignore[arg-type]
    subprocess.Popen.__init__ = _refuse  # type: ignore[method-assign, assignment]
