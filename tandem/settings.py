"""Settings: one frozen, typed object per service; defaults < environment < command line; read only in `__main__`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TypeVar

from pydantic import ValidationError
from pydantic_settings import BaseSettings, CliSettingsSource, SettingsConfigDict


class Settings(BaseSettings):
    """Base of every service's settings. `TANDEM_FIELD_NAME` and `--field-name` set a field."""

    model_config = SettingsConfigDict(frozen=True, env_prefix="TANDEM_", extra="forbid")


S = TypeVar("S", bound=Settings)


def load(settings: type[S], arguments: Sequence[str] | None = None, program: str | None = None) -> S:
    """Read settings for a process; a bad value ends it with status 2 and a line that names the field."""
    source = CliSettingsSource[S](
        settings, cli_prog_name=program, cli_parse_args=list(sys.argv[1:] if arguments is None else arguments),
        cli_kebab_case=True, cli_implicit_flags=True, cli_hide_none_type=True, cli_avoid_json=True,
    )  # fmt: skip
    try:
        return settings(_cli_settings_source=source)  # type: ignore[call-arg]
    except ValidationError as error:
        for problem in error.errors():
            field = ".".join(str(part) for part in problem["loc"]) or settings.__name__
            print(f"{field}: {problem['msg']} (got {problem['input']!r})", file=sys.stderr)
        raise SystemExit(2) from None
