"""The Jinja environment that transformers renders chat templates in: its blocks, tags, filters and globals.

A template is untrusted code. Jinja's sandbox keeps it from Python's internals but does not bound time or memory, so
gateways compile and render only in a helper process.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Template, TemplateError
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.nodes import Node, Scope
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace


def compiled(source: str, now: Callable[[], datetime]) -> Template:
    """Raises TemplateError: a syntax error; hostile templates may raise any other."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: now().strftime(form)
    environment.globals["namespace"] = _namespace
    environment.globals["dict"] = _Dict()
    return environment.from_string(source)


class _Generation(Extension):
    """{% generation %}, which marks for training what an assistant says."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        return Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Namespace(Namespace):
    """A namespace without private attributes, by which a template could reach what the sandbox hides."""

    def __setitem__(self, name: str, value: Any) -> None:
        _check_names((name,))
        super().__setitem__(name, value)


def _namespace(*args: Any, **said: Any) -> _Namespace:
    made = dict(*args, **said)
    _check_names(made)
    return _Namespace(made)


def _check_names(names: Iterable[Any]) -> None:
    for name in names:
        if isinstance(name, str) and name.startswith("_"):
            raise SecurityError(f"a namespace has no private attribute {name!r}")


class _Dict:
    """The type `dict` as far as templates may use it."""

    def __call__(self, *args: Any, **said: Any) -> dict[Any, Any]:
        return dict(*args, **said)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | str | None = None,
    separators: tuple[str, str] | None = None, sort_keys: bool = False,
) -> str:  # fmt: skip
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
