"""The resources that a process holds, and those that nothing accounts for: one report, the same of every process.

    held         what -> how many, at this moment
    violations   each names one thing and what is wrong with it; none is what should be

Answered by gRPC (integrity_service.py), as JSON at /debug/integrity where a process speaks HTTP, and gathered by
`tandem doctor --integrity`.
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
    """Requests come and go while their parts are looked at in turn: only what two looks find is wrong."""
    first = await look()
    if not first.violations:
        return first
    await asyncio.sleep(AGAIN_S)
    second = await look()
    return IntegrityReport(second.held, tuple(text for text in second.violations if text in first.violations))
