"""A request's spans as Chrome's trace events, which Perfetto reads: a process each, and tracks for what it did.

    gateway         spans, one within another
    prefill worker  spans │ chunks: from a chunk's first push to its last │ layer pushes
    decode worker   spans, with its steps as instants

Times are microseconds from the root's begin, by the clock of each host.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

SPANS, CHUNKS, PUSHES = "spans", "chunks", "layer pushes"
Event = dict[str, Any]


@dataclass(frozen=True, slots=True)
class OwnedSpan:
    """A span and the process that it is of."""

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


@dataclass(slots=True)
class _Timeline:
    pid: int
    name: str
    lanes: dict[str, list[list[float]]] = field(default_factory=dict)  # of each track: ends of what is open
    threads: dict[tuple[str, int], int] = field(default_factory=dict)

    def thread(self, track: str, start: float, end: float) -> int:
        """One in which this lies within what is open, or behind it. Called in the order of starts."""
        lanes = self.lanes.setdefault(track, [])
        for open_ends in lanes:
            while open_ends and open_ends[-1] <= start:
                open_ends.pop()
        fits = (number for number, open_ends in enumerate(lanes) if not open_ends or end <= open_ends[-1])
        if (lane := next(fits, len(lanes))) == len(lanes):
            lanes.append([])
        lanes[lane].append(end)
        return self.threads.setdefault((track, lane), len(self.threads) + 1)

    def named(self) -> Iterator[Event]:
        yield {"ph": "M", "pid": self.pid, "name": "process_name", "args": {"name": self.name}}
        yield {"ph": "M", "pid": self.pid, "name": "process_sort_index", "args": {"sort_index": self.pid}}
        for (track, _), tid in self.threads.items():
            order = (SPANS, CHUNKS, PUSHES).index(track)
            yield {"ph": "M", "pid": self.pid, "tid": tid, "name": "thread_name", "args": {"name": track}}
            yield {"ph": "M", "pid": self.pid, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": order}}


def chrome_trace(spans: Sequence[OwnedSpan], said: Mapping[str, Any]) -> dict[str, Any]:
    """
    Args:
        spans: the root first.
        said: of the whole request.
    """
    begin, numbers = spans[0].span.start_time_unix_nano, count(1)
    processes: dict[tuple[str, str], _Timeline] = {}
    events: list[Event] = []
    for one in sorted(spans, key=lambda one: (one.span.start_time_unix_nano, -one.span.end_time_unix_nano)):
        owner = one.service, one.instance
        if owner not in processes:
            processes[owner] = _Timeline(next(numbers), " ".join(filter(None, owner)))
        events += _events_of(one, processes[owner], begin)
    names = [event for process in processes.values() for event in process.named()]
    return {"traceEvents": [*names, *events], "displayTimeUnit": "ms", "otherData": dict(said)}


def _events_of(one: OwnedSpan, process: _Timeline, begin: int) -> Iterator[Event]:
    span, pushes = one.span, []
    start, end = _us(span.start_time_unix_nano, begin), _us(span.end_time_unix_nano, begin)
    args = {**one.attributes, "span_id": span.span_id.hex()}
    if span.status.code == Status.STATUS_CODE_ERROR:
        args["error"] = span.status.message or "error"
    if span.dropped_events_count:
        args["events that were dropped"] = span.dropped_events_count
    if span.links:
        args["linked to"] = [link.span_id.hex() for link in span.links]
    tid = process.thread(SPANS, start, end)
    yield _slice(process.pid, tid, span.name, start, end, args)
    for event in span.events:
        told = _plain(event.attributes)
        if event.name == "layer":
            pushes.append((_us(event.time_unix_nano, begin), told))
        elif event.name != "chunk":
            at = {"ph": "i", "s": "t", "pid": process.pid, "tid": tid, "ts": _us(event.time_unix_nano, begin)}
            yield {**at, "name": event.name, "cat": one.service, "args": told}
    yield from _pushes(pushes, process)


def _pushes(pushes: list[tuple[float, dict[str, Any]]], process: _Timeline) -> Iterator[Event]:
    """Each is noted at its end."""
    spent = sorted(((end - 1e6 * told["push_s"], end, told) for end, told in pushes), key=lambda push: push[0])
    chunks: dict[int, tuple[float, float, int]] = {}
    for start, end, told in spent:
        first, last, _ = chunks.get(told["first_block"], (start, end, 0))
        chunks[told["first_block"]] = min(first, start), max(last, end), told["blocks"]
    for first_block, (start, end, blocks) in chunks.items():
        said = {"first_block": first_block, "blocks": blocks}
        tid = process.thread(CHUNKS, start, end)
        yield _slice(process.pid, tid, f"chunk from block {first_block}", start, end, said)
    for start, end, told in spent:
        tid = process.thread(PUSHES, start, end)
        yield _slice(process.pid, tid, f"layer {told['layer']}", start, end, told)


def _slice(pid: int, tid: int, name: str, start: float, end: float, args: dict[str, Any]) -> Event:
    return {
        "ph": "X", "pid": pid, "tid": tid, "name": name, "cat": "tandem", "ts": start, "dur": max(0.0, end - start),
        "args": args,
    }  # fmt: skip


def _us(nanoseconds: int, begin: int) -> float:
    return (nanoseconds - begin) / 1000


def _plain(attributes: Iterable[KeyValue]) -> dict[str, Any]:
    return {one.key: _value(one.value) for one in attributes}


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(one) for one in value.array_value.values]
    return getattr(value, kind) if kind in ("string_value", "bool_value", "int_value", "double_value") else None
