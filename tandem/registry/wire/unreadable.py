"""Unreadable rows of the registry: each is skipped, counted and logged once, and all others are read.

    a row's text ── parse ──> its value
                      └────── raises ──> `wrong`: its name and why, for `tandem doctor`; `found`: how often, by kind

Redis has a wrong value if another program wrote it, if Redis evicted a part of it, or if a newer release wrote it.
Scripts delete the wrong values that they meet, and report them (`mended`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TypeVar

import structlog

from tandem.registry.wire.connection import RegistryConnection

log = structlog.get_logger(__name__)
T = TypeVar("T")
# The most rows that are remembered by name; further ones are only counted.
MOST_NAMED = 256
MAX_TEXT = 120
# Policies of a Redis that evicts nothing, or reports no policy.
KEPT = ("", "noeviction")
# The errors that a parser may raise for a row's text.
MISREAD = (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, RecursionError)


class UnreadableRows:
    """The unreadable rows that one client of the registry has met."""

    def __init__(self, connection: RegistryConnection) -> None:
        self._connection = connection
        self.found: Counter[str] = Counter()  # their number by kind; a row counts once for as long as it stays wrong
        self.wrong: dict[tuple[str, str], str] = {}  # (kind, name) of rows that were wrong when last read: why
        self.mended: dict[str, int] = {}  # key: how often scripts have recently deleted a wrong value there

    def read(self, kind: str, name: str, parse: Callable[[], T], default: T) -> T:
        """Returns what `parse` returns; the default if it fails."""
        name = name[:MAX_TEXT]
        try:
            parsed = parse()
        except MISREAD as error:
            self._note(kind, name, f"{type(error).__name__}: {error}"[:MAX_TEXT])
            return default
        self.wrong.pop((kind, name), None)
        return parsed

    def read_each(self, kind: str, rows: Iterable[tuple[str, Callable[[], T]]]) -> dict[str, T]:
        """Returns the readable rows, by name.

        Rows of this kind that are no longer there are no longer reported as wrong.
        """
        parsed: dict[str, T] = {}
        names: set[str] = set()
        nothing: tuple[T, ...] = ()
        for name, parse in rows:
            names.add(name[:MAX_TEXT])
            for one in self.read(kind, name, partial(_alone, parse), nothing):
                parsed[name] = one
        for gone in [one for one in self.wrong if one[0] == kind and one[1] not in names]:
            del self.wrong[gone]
        return parsed

    def read_texts(self, kind: str, texts: Iterable[str], parse: Callable[[str], T]) -> list[T]:
        """Returns the readable rows of a kind whose rows have no names."""
        return list(self.read_each(kind, ((text, partial(parse, text)) for text in texts)).values())

    async def evicts(self) -> str:
        """Returns a warning if Redis may evict rows; empty if it does not. Raises RegistryUnavailable."""
        policy = await self._connection.eviction_policy()
        wanted = "a registry needs maxmemory-policy noeviction"
        return f"Redis may evict rows of the registry: {wanted}, and it is {policy}" if policy not in KEPT else ""

    def note_mended(self, mended: Mapping[str, int]) -> None:
        """Logs the wrong values that scripts have deleted since the last call."""
        new = {name: count for name, count in mended.items() if count > self.mended.get(name, 0)}
        for name, count in new.items():
            self.found["mended"] += count - self.mended.get(name, 0)
        self.mended = dict(mended)
        if new:
            log.warning("the registry had wrong values, which were taken away", keys=new)

    def report(self) -> list[str]:
        """Describes what is wrong, one line each."""
        rows = [f"{kind} {name!r}: {why}" for (kind, name), why in sorted(self.wrong.items())]
        taken = ", ".join(f"{name} ({count})" for name, count in sorted(self.mended.items()))
        return rows + ([f"wrong values were taken away in the last hour: {taken}"] if taken else [])

    def _note(self, kind: str, name: str, why: str) -> None:
        if (kind, name) in self.wrong:
            return
        self.found[kind] += 1
        if len(self.wrong) < MOST_NAMED:
            self.wrong[kind, name] = why
            log.error("a row of the registry cannot be read: it is skipped", kind=kind, name=name, reason=why)


def _alone(parse: Callable[[], T]) -> tuple[T, ...]:
    return (parse(),)
