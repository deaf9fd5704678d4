"""A run's messages, faults and log lines, drawn with one column a process.

3.412350     g0 ── reservations 1 ──────> d0
3.412731                           d0 ── reserved 1 ──> g0          …
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from google.protobuf.message import Message
from grpc import StatusCode

from tandem.transfer import TransferError
from tandem.transfer.protocol.wire import parse_header
from tandem.v1 import worker_pb2

COLUMN = 22
# Calls that only say that all is well.
QUIET = ("workers", "heads", "read", "subscribe", "lease", "window", "PING", "PONG", "renew")


def draw(events: Sequence[tuple[Any, ...]], *, quiet: bool = True) -> str:
    names = sorted({name for event in events if event[1] == "message" for name in event[2:4]})
    methods: dict[tuple[int, int], str] = {}
    lines = [" " * 12 + "".join(name.ljust(COLUMN) for name in names)]
    for event in events:
        for column, text in _texts(event, names, methods, quiet):
            lines.append(f"{event[0]:10.6f}  {' ' * (COLUMN * column)}{text}")
    return "\n".join(lines)


def _texts(
    event: tuple[Any, ...], names: list[str], methods: dict[tuple[int, int], str], quiet: bool
) -> Iterator[tuple[int, str]]:
    _, kind, *rest = event
    if kind == "message":
        source, target, connection, frame = rest
        text = _frame(connection, frame, methods, source)
        if not (quiet and any(word in text.split() for word in QUIET)) and text:
            left, right = names.index(source), names.index(target)
            arrow = f"{source} ──{text}──> {target}" if left < right else f"{target} <──{text}── {source}"
            yield min(left, right), arrow
    elif kind == "fault":
        yield 0, f"*** {' '.join(map(str, rest))}"
    elif kind == "exit":
        yield 0, f"*** exit {rest}"
    elif kind == "log":
        name, level, line = rest
        if level in ("warning", "error"):
            details = {key: value for key, value in line.items() if key != "event"}
            yield names.index(name) if name in names else 0, f"({name}: {line.get('event')} {details})"


def _frame(connection: int, frame: Any, methods: dict[tuple[int, int], str], source: str) -> str:
    if isinstance(frame, bytes):
        return _kv(frame)
    kind, number, *rest = frame
    if not isinstance(kind, str):  # a reply of Redis
        return ""
    if kind == "call" and isinstance(rest[0], str) and rest[0].startswith("/"):
        methods[connection, number] = rest[0].rpartition("/")[2]
        return f" {methods[connection, number]} "
    if kind in ("call", "read", "subscribe", "ping"):
        return f" redis {rest[0]} {str(rest[2][:1])[1:40]} " if kind == "call" else f" redis {kind} "
    method = methods.get((connection, number), "")
    if kind == "message" and method == "Work":
        return _work(worker_pb2.WorkRequest if source.startswith("g") else worker_pb2.WorkResponse, rest[0])
    if kind == "message":
        return f" {method} {len(rest[0])} bytes "
    if kind == "status":
        return f" {method} {rest[0].name}{' ' + rest[1] if rest[0] is not StatusCode.OK else ''} "
    if kind in ("cancel", "window", "goaway"):
        return f" {method} {kind} "
    return ""  # the end of a call's requests


def _work(kind: type[worker_pb2.WorkRequest] | type[worker_pb2.WorkResponse], data: bytes) -> str:
    said = kind.FromString(data).ListFields()
    return f" {' '.join(f'{field.name} {_count(value)}'.rstrip() for field, value in said)} "


def _count(value: Any) -> str:
    """A number as it is, or how many there are of a kind; empty for one alone."""
    if isinstance(value, int):
        return str(value)
    return "" if isinstance(value, str | Message) else str(len(value))


def _kv(message: bytes) -> str:
    try:
        header = parse_header(message)
    except TransferError:
        return " KV damaged "
    return f" KV {header.kind.name} {header.handle} "
