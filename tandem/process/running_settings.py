"""Settings that change while a process runs: by a file that it follows, and by operators for a limited time.

    its start's settings  <  the file `followed`, JSON: {"max_queued": 64, …}  <  `tandem set`, until its time is over

The file is the source of truth: an operator's change expires by itself. A malformed file changes nothing and is logged;
each change is logged with its author.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

import structlog
from pydantic import ValidationError

from tandem.process.work_threads import WorkThreads
from tandem.settings import Settings

log = structlog.get_logger(__name__)
FOLLOW_S = 0.5
MAX_TTL_S = 24 * 3600.0
S = TypeVar("S", bound=Settings)


class RunningSettings(Generic[S]):
    """Settings that may change, which `run` follows. `apply` is called with the settings in force at each change."""

    def __init__(
        self, base: S, file: Path | None, may_change: frozenset[str], apply: Callable[[S], None],
        *, is_shared: bool = False,
    ) -> None:  # fmt: skip
        """
        Args:
            is_shared: the file also has settings of other services, which are ignored.

        Raises:
            OSError, ValueError: the file is missing or malformed.
        """
        self._base, self._file, self._may_change, self._apply = base, file, may_change, apply
        self._is_shared = is_shared
        self._content = file.read_bytes() if file else b"{}"
        self._of_file = self._parsed(self._content)
        # Setting: (value, when it expires on the event loop's clock).
        self._overrides: dict[str, tuple[Any, float]] = {}
        self._problem = ""
        self._thread = WorkThreads("settings", 1)
        self.in_force = self._merged(self._of_file, {})
        apply(self.in_force)

    def override(self, changes: Mapping[str, Any], ttl_s: float, by: str) -> None:
        """Sets settings for `ttl_s` seconds; None returns a setting to the file's value.

        Raises:
            ValueError: what is wrong, in one line.
        """
        if not 0 < ttl_s <= MAX_TTL_S:
            raise ValueError(f"ttl_s must be above 0 and at most {MAX_TTL_S:.0f}, got {ttl_s}")
        until = asyncio.get_running_loop().time() + ttl_s
        new = {**self._overrides, **{name: (value, until) for name, value in changes.items()}}
        kept = {name: one for name, one in new.items() if one[0] is not None}
        merged = self._merged(self._of_file, {**dict.fromkeys(changes), **_values(kept)})
        self._overrides = kept
        self._take_over(merged, by, ttl_s)

    def report(self) -> dict[str, Any]:
        """Returns the settings in force, and the remaining seconds of those that operators set."""
        now, values = asyncio.get_running_loop().time(), self.in_force.model_dump(mode="json")
        left = {name: round(until - now, 1) for name, (_, until) in self._overrides.items()}
        return {"settings": {name: values[name] for name in sorted(self._may_change)}, "ttl_s": left}

    async def run(self) -> None:
        """Follows the file, and ends what operators set in time, until cancelled."""
        while True:
            await asyncio.sleep(FOLLOW_S)
            now = asyncio.get_running_loop().time()
            over = [name for name, (_, until) in self._overrides.items() if until <= now]
            if over:
                for name in over:
                    del self._overrides[name]
                self._take_over(self._merged(self._of_file, _values(self._overrides)), "time is over")
            if self._file:
                await self._follow(self._file)

    async def _follow(self, file: Path) -> None:
        try:
            content = await self._thread.run(file.read_bytes)
            if content != self._content:
                of_file = self._parsed(content)
                merged = self._merged(of_file, _values(self._overrides))
                self._content, self._of_file = content, of_file
                self._take_over(merged, str(file))
            self._problem = ""
        except (OSError, ValueError) as error:
            if str(error) != self._problem:
                self._problem = str(error)
                log.error("settings cannot be read: those before stay in force", error=self._problem)

    def _parsed(self, content: bytes) -> dict[str, Any]:
        """Parses the file's settings.

        Raises:
            ValueError: the file is malformed.
        """
        found = json.loads(content)
        if not isinstance(found, dict):
            raise ValueError("a file of settings is a JSON object")
        return {name: found[name] for name in found if name in self._may_change or not self._is_shared}

    def _merged(self, of_file: Mapping[str, Any], overrides: Mapping[str, Any]) -> S:
        given = {name: value for name, value in overrides.items() if value is not None}
        if unknown := sorted((of_file.keys() | overrides.keys()) - self._may_change):
            raise ValueError(f"{unknown[0]!r} cannot be set at run time; {', '.join(sorted(self._may_change))} can")
        if not of_file and not given:
            return self._base
        try:
            return type(self._base).model_validate({**self._base.model_dump(), **of_file, **given})
        except ValidationError as error:
            wrong = error.errors()[0]
            raise ValueError(f"{'.'.join(map(str, wrong['loc']))}: {wrong['msg']}") from None

    def _take_over(self, new: S, by: str, ttl_s: float | None = None) -> None:
        before, self.in_force = self.in_force, new
        old, now = before.model_dump(mode="json"), new.model_dump(mode="json")
        changes = {name: [old[name], now[name]] for name in sorted(self._may_change) if old[name] != now[name]}
        if changes:
            self._apply(new)
            log.warning("settings changed", by=by, changes=changes, **({"ttl_s": ttl_s} if ttl_s else {}))


def _values(overrides: Mapping[str, tuple[Any, float]]) -> dict[str, Any]:
    return {name: value for name, (value, _) in overrides.items()}
