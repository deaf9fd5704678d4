"""A request's spans as the rows of the console's waterfall, by process.

    each span                       a row with one bar, and a row of marks for each kind of its events
    a prefill worker's kv.transfer  beneath it a row of chunks, from a chunk's first push to its last, and one of layers

Times are microseconds from the root's begin, by the clock of each host.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class OwnedSpan:
    """A span and its process."""

    service: str
    instance: str
    span: Span
    attributes: Mapping[str, Any]

    @classmethod
    def of(cls, resource: Resource, span: Span) -> OwnedSpan:
        owner = _plain(resource.attributes)
        service, instance = owner.get("service.name", ""), owner.get("service.instance.id", "")
        return cls(str(service), str(instance), span, _plain(span.attributes))

    @property
    def is_hop(self) -> bool:
        """True for the gateway's side of a call to a worker."""
        return self.span.kind == Span.SPAN_KIND_CLIENT


def rows_of(spans: Sequence[OwnedSpan]) -> list[Row]:
    """Returns the rows of a process together, and the processes in the order of their first spans.

    Args:
        spans: the root first.
    """
    begin = spans[0].span.start_time_unix_nano
    processes: dict[str, list[Row]] = {}
    for one in sorted(spans, key=lambda one: (one.span.start_time_unix_nano, -one.span.end_time_unix_nano)):
        name = f"{one.service} {one.instance}".strip()
        rows = processes.setdefault(name, [])
        rows += ({"process": name, **row} for row in _rows_of(one, begin))
    return [row for rows in processes.values() for row in rows]


def _rows_of(one: OwnedSpan, begin: int) -> Iterator[Row]:
    span = one.span
    start, end = _us(span.start_time_unix_nano, begin), _us(span.end_time_unix_nano, begin)
    args = dict(one.attributes)
    if span.status.code == Status.STATUS_CODE_ERROR:
        args["error"] = span.status.message or "error"
    if span.dropped_events_count:
        args["events that were dropped"] = span.dropped_events_count
    if span.links:
        args["linked to"] = [link.span_id.hex() for link in span.links]
    yield {"name": span.name, "bars": [_bar(span.name, start, end, args)], "marks": []}
    pushes: list[tuple[float, dict[str, Any]]] = []
    marks: dict[str, list[float]] = {}
    for event in span.events:
        at = _us(event.time_unix_nano, begin)
        if event.name == "layer":
            pushes.append((at, _plain(event.attributes)))
        elif event.name != "chunk":
            marks.setdefault(event.name, []).append(at)
    if pushes:
        yield from _pushed(pushes)
    yield from ({"name": name, "bars": [], "marks": times} for name, times in marks.items())


def _pushed(pushes: list[tuple[float, dict[str, Any]]]) -> Iterator[Row]:
    """Yields the rows of chunks and of layers. Each push is recorded at its end."""
    spent = sorted(((end - 1e6 * said["push_s"], end, said) for end, said in pushes), key=lambda push: push[0])
    chunks: dict[int, tuple[float, float, int]] = {}
    for start, end, said in spent:
        first, last, _ = chunks.get(said["first_block"], (start, end, 0))
        chunks[said["first_block"]] = min(first, start), max(last, end), said["blocks"]
    bars = [
        _bar(f"chunk from block {first_block}", start, end, {"first_block": first_block, "blocks": blocks})
        for first_block, (start, end, blocks) in chunks.items()
    ]
    yield {"name": "chunks", "bars": bars, "marks": []}
    bars = [_bar(f"layer {said['layer']}", start, end, said) for start, end, said in spent]
    yield {"name": "layer pushes", "bars": bars, "marks": []}


def _bar(name: str, start: float, end: float, args: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "at": start, "took": max(0.0, end - start), "args": args}


def _us(nanoseconds: int, begin: int) -> float:
    return (nanoseconds - begin) / 1000


def _plain(attributes: Iterable[KeyValue]) -> dict[str, Any]:
    return {one.key: _value(one.value) for one in attributes}


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(one) for one in value.array_value.values]
    return getattr(value, kind) if kind in ("string_value", "bool_value", "int_value", "double_value") else None
