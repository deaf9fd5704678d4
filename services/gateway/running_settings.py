"""Settings that a running gateway takes over: a file that it follows, and what operators set for a while.

    its start's settings  <  the file `followed`, JSON: {"max_queued": 64, …}  <  `tandem set`, until its time is over

The file is the truth: what is set over it goes by itself. A file that turns bad changes nothing, loudly, and each
change is a line of the log that says who and what.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import Any

import structlog
from pydantic import ValidationError

from services.gateway.settings import GatewaySettings
from tandem.process import WorkThreads

log = structlog.get_logger(__name__)
FOLLOW_S = 0.5
MAX_TTL_S = 24 * 3600.0
FOLLOWED = frozenset(
    {
        "classes", "tenant_weights", "max_queued", "max_admitted_tokens", "prefill_queue_tokens", "max_choices",
        "timeout_s", "log_level", "trace_sampling",
    }
)  # fmt: skip


class RunningSettings:
    """Run `run` as a task. `apply` is called with the settings in force, at each change."""

    def __init__(self, base: GatewaySettings, apply: Callable[[GatewaySettings], None]) -> None:
        """
        Raises:
            OSError, ValueError: the file is not there, or malformed.
        """
        self._base, self._apply = base, apply
        self._content = base.followed.read_bytes() if base.followed else b"{}"
        self._of_file = _parsed(self._content)
        self._overrides: dict[str, tuple[Any, float]] = {}  # until when, on the event loop's clock
        self._problem = ""
        self._thread = WorkThreads("settings", 1)
        self.in_force = self._merged(self._of_file, {})
        apply(self.in_force)

    def override(self, changes: Mapping[str, Any], ttl_s: float, by: str) -> None:
        """Set these for so long; null returns one to what the file says.

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
        """Give the settings in force, and for how long those that were set still are."""
        now, values = asyncio.get_running_loop().time(), self.in_force.model_dump(mode="json")
        left = {name: round(until - now, 1) for name, (_, until) in self._overrides.items()}
        return {"settings": {name: values[name] for name in sorted(FOLLOWED)}, "ttl_s": left}

    async def run(self) -> None:
        """Follow the file, and the end of what was set, until cancelled."""
        while True:
            await asyncio.sleep(FOLLOW_S)
            now = asyncio.get_running_loop().time()
            over = [name for name, (_, until) in self._overrides.items() if until <= now]
            if over:
                for name in over:
                    del self._overrides[name]
                self._take_over(self._merged(self._of_file, _values(self._overrides)), "time is over")
            if self._base.followed:
                await self._follow()

    async def _follow(self) -> None:
        assert self._base.followed is not None
        try:
            content = await self._thread.run(self._base.followed.read_bytes)
            if content != self._content:
                of_file = _parsed(content)
                merged = self._merged(of_file, _values(self._overrides))
                self._content, self._of_file = content, of_file
                self._take_over(merged, str(self._base.followed))
            self._problem = ""
        except (OSError, ValueError) as error:
            if str(error) != self._problem:
                self._problem = str(error)
                log.error("settings cannot be read: those before stay in force", error=self._problem)

    def _merged(self, of_file: Mapping[str, Any], overrides: Mapping[str, Any]) -> GatewaySettings:
        given = {name: value for name, value in overrides.items() if value is not None}
        if unknown := sorted((of_file.keys() | overrides.keys()) - FOLLOWED):
            raise ValueError(f"{unknown[0]!r} cannot be set at run time; {', '.join(sorted(FOLLOWED))} can")
        try:
            return type(self._base).model_validate({**self._base.model_dump(), **of_file, **given})
        except ValidationError as error:
            wrong = error.errors()[0]
            raise ValueError(f"{'.'.join(map(str, wrong['loc']))}: {wrong['msg']}") from None

    def _take_over(self, new: GatewaySettings, by: str, ttl_s: float | None = None) -> None:
        before, self.in_force = self.in_force, new
        old, now = before.model_dump(mode="json"), new.model_dump(mode="json")
        changes = {name: [old[name], now[name]] for name in sorted(FOLLOWED) if old[name] != now[name]}
        if changes:
            self._apply(new)
            log.warning("settings changed", by=by, changes=changes, **({"ttl_s": ttl_s} if ttl_s else {}))


def _values(overrides: Mapping[str, tuple[Any, float]]) -> dict[str, Any]:
    return {name: value for name, (value, _) in overrides.items()}


def _parsed(content: bytes) -> dict[str, Any]:
    """
    Raises:
        ValueError
    """
    found = json.loads(content)
    if not isinstance(found, dict):
        raise ValueError("a file of settings is a JSON object")
    return found
