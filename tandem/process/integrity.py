"""The integrity report of any process: the resources that it holds, and those that nothing accounts for.

    held         resource -> how many are held now
    violations   each names one resource and what is wrong with it; there should be none

Processes answer it by gRPC (integrity_service.py), and as JSON at /debug/integrity if they speak HTTP.
`tandem doctor --integrity` collects the reports.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

AGAIN_S = 0.5


@dataclass(frozen=True, slots=True)
class IntegrityReport:
    held: Mapping[str, int] = field(default_factory=dict)
    violations: tuple[str, ...] = ()

    def __add__(self, other: IntegrityReport) -> IntegrityReport:
        """Adds the report of another part of the same process."""
        return IntegrityReport({**self.held, **other.held}, self.violations + other.violations)

    def json(self) -> dict[str, Any]:
        return {"whole": not self.violations, "violations": list(self.violations), "held": dict(self.held)}

    def __str__(self) -> str:
        held = ", ".join(f"{count} {what}" for what, count in sorted(self.held.items()))
        return "; ".join([*([held] if held else []), *self.violations])


Look: TypeAlias = Callable[[], Awaitable[IntegrityReport]]


async def lasting(look: Look) -> IntegrityReport:
    """Returns a report with only the violations that two looks find, as requests begin and end during a look."""
    first = await look()
    if not first.violations:
        return first
    await asyncio.sleep(AGAIN_S)
    second = await look()
    return IntegrityReport(second.held, tuple(text for text in second.violations if text in first.violations))
