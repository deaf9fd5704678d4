"""W3C trace contexts of calls."""

from __future__ import annotations

import secrets
import sys
from typing import Any


def new_traceparent(sampled: bool = True) -> str:
    """A trace of its own, for a caller that has none: its collector finds the call by `trace_id`."""
    return f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-{'01' if sampled else '00'}"


def trace_id(traceparent: str) -> str:
    return traceparent.split("-")[1]


def trace_headers(traceparent: str = "") -> tuple[tuple[str, str], ...]:
    """Metadata of a call: of the trace that is named, else of OpenTelemetry's current one where this process has it."""
    if traceparent:
        return (("traceparent", traceparent),)
    propagate: Any = sys.modules.get("opentelemetry.propagate")
    carrier: dict[str, str] = {}
    if propagate is not None:
        propagate.inject(carrier)
    return tuple((name.lower(), value) for name, value in carrier.items())
