"""Modules that starting a service imports, read from sources: nothing is imported."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
OURS = ("tandem", "services")


def imported_by(name: str) -> set[str]:
    """Dotted names of our own modules, and the first part of others' names."""
    found: set[str] = set()
    seen = [name]
    while seen:
        name = seen.pop()
        if name not in found:
            found.add(name)
            if name.startswith(OURS):
                seen += [name.rpartition(".")[0] or name, *_at_start(file_of(name))]
    return found - set(sys.stdlib_module_names)


def file_of(module: str) -> Path:
    path = ROOT / module.replace(".", "/")
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


@cache
def _at_start(path: Path) -> frozenset[str]:
    return frozenset(_of_statements(ast.parse(path.read_text(encoding="utf-8")).body))


def _of_statements(body: list[ast.stmt]) -> Iterator[str]:
    """Without what is for types alone, what is imported when it is called, and what may be absent."""
    for node in body:
        if isinstance(node, ast.Import):
            yield from (_module(alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (_module(node.module, alias.name) for alias in node.names)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.unparse(node.test):
            yield from _of_statements(node.body + node.orelse)


def _module(name: str, member: str) -> str:
    if not name.startswith(OURS):
        return name.partition(".")[0]
    return f"{name}.{member}" if member and file_of(f"{name}.{member}").exists() else name
