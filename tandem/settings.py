"""Settings: one frozen, typed object per service; defaults < environment < command line; read only in `__main__`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import TypeVar

from pydantic import ValidationError
from pydantic_settings import BaseSettings, CliSettingsSource, SettingsConfigDict, SettingsError


class Settings(BaseSettings):
    """Base of every service's settings. `TANDEM_FIELD_NAME` and `--field-name` set a field."""

    model_config = SettingsConfigDict(frozen=True, env_prefix="TANDEM_", extra="forbid")


S = TypeVar("S", bound=Settings)


def load(settings: type[S], arguments: Sequence[str] | None = None, program: str | None = None) -> S:
    """Read settings for a process; a bad value ends it with status 2 and a line that names the option or variable."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    source = CliSettingsSource[S](
        settings, cli_prog_name=program, cli_parse_args=given, cli_kebab_case=True, cli_implicit_flags=True,
        cli_hide_none_type=True, cli_avoid_json=True, formatter_class=_Help,
        parse_args_method=argparse.ArgumentParser.parse_intermixed_args,  # a name may also come behind options
    )  # fmt: skip
    try:
        return settings(_cli_settings_source=source)
    except ValidationError as error:
        for problem in error.errors():
            name = _origin(problem["loc"], given) if problem["loc"] else settings.__name__
            got = "" if problem["type"] == "missing" else f" (got {problem['input']!r})"
            print(f"{name}: {problem['msg']}{got}", file=sys.stderr)
        raise SystemExit(2) from None
    except SettingsError as error:  # a list or a map of the environment that is no JSON
        field = str(error).partition('"')[2].partition('"')[0]
        print(f"{_origin((field,), given)}: {error.__cause__}", file=sys.stderr)
        raise SystemExit(2) from None


def _origin(field: tuple[int | str, ...], arguments: Sequence[str]) -> str:
    """The option or environment variable by which the user set `field`."""
    option, variable = f"--{field[0]}".replace("_", "-"), f"TANDEM_{field[0]}".upper()
    given = any(argument.partition("=")[0] == option for argument in arguments)
    name = variable if variable in os.environ and not given else option
    return ".".join([name, *map(str, field[1:])])


class _Help(argparse.RawDescriptionHelpFormatter):
    """Names a default once, and only where there is one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        words, _, default = (action.help or "").partition("(default: ")
        return words.rstrip() if default.rstrip(")") in ("", "None") else action.help
