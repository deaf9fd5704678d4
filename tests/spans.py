"""Spans that this process records, and the catalogue beside them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from opentelemetry.sdk.trace import ReadableSpan

from tandem.catalogue.spans import CATALOGUE, OF_ANY, ROOT

Seen = dict[str, tuple[set[str], dict[str, set[str]]]]
REFUSED = "kv.transfer.refused."


def seen(spans: Iterable[ReadableSpan], *ours: str) -> Seen:
    """The attributes, and events with theirs, that each of the spans named `ours` was ever given."""
    found: Seen = {}
    for span in spans:
        name = ROOT if " " in span.name else span.name
        if name in ours:
            attributes, events = found.setdefault(name, (set(), {}))
            attributes |= {f"{REFUSED}<transport>" if key.startswith(REFUSED) else key for key in span.attributes or ()}
            for event in span.events:
                if event.name != "exception":  # the SDK's own
                    events.setdefault(event.name, set()).update(event.attributes or ())
    return {name: (attributes - OF_ANY.keys(), events) for name, (attributes, events) in found.items()}


def catalogued(service: str) -> Seen:
    return {
        span.name: (set(span.attributes), {name: set(said) for name, said in span.events.items()})
        for span in CATALOGUE
        if span.service == service
    }


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})
