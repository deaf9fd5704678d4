"""Names that a cluster serves besides its models (LoRA adapters, aliases), in one list for all gateways."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Generic, TypeVar

from tandem.adapters import AdapterRef
from tandem.aliases import Alias, text_of_alias
from tandem.registry.wire import RegistryConnection, UnreadableRows

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Named(Generic[T]):
    """A list's content. `epoch` changes when Redis has lost its data; empty while Redis is empty."""

    epoch: str
    by_name: dict[str, T]


class NamedList(Generic[T]):
    """A list of names in Redis. Each call returns its new content, without malformed or newer versions' entries."""

    def __init__(
        self, connection: RegistryConnection, unreadable: UnreadableRows, kind: str, parse: Callable[[str, str], T],
        text: Callable[[T], str],
    ) -> None:  # fmt: skip
        """`parse`: makes an entry of its name and text; raises ValueError. `text`: the inverse."""
        self._connection, self._kind, self._parse, self._text = connection, kind, parse, text
        self._unreadable = unreadable

    async def all(self) -> Named[T]:
        return await self._call()

    async def put(self, name: str, one: T) -> Named[T]:
        """Adds an entry, or replaces the entry of that name."""
        return await self._call("put", name, self._text(one))

    async def restore(self, known: Mapping[str, T]) -> Named[T]:
        """Adds the entries whose names Redis does not have, after it has lost its data."""
        return await self._call("restore", *chain.from_iterable((name, self._text(one)) for name, one in known.items()))

    async def drop(self, name: str) -> Named[T]:
        return await self._call("drop", name)

    async def _call(self, *arguments: str) -> Named[T]:
        epoch, flat = await self._connection.call("named", self._kind, *arguments)
        rows = ((name, partial(self._parse, name, text)) for name, text in zip(flat[::2], flat[1::2], strict=True))
        return Named(epoch, self._unreadable.read_each(self._kind, rows))


def adapters(connection: RegistryConnection, unreadable: UnreadableRows) -> NamedList[AdapterRef]:
    return NamedList(
        connection, unreadable, "adapters", parse_adapter, lambda ref: json.dumps([ref.path, ref.revision, ref.model])
    )


def aliases(connection: RegistryConnection, unreadable: UnreadableRows) -> NamedList[Alias]:
    return NamedList(connection, unreadable, "aliases", lambda name, text: Alias(name, json.loads(text)), text_of_alias)


def parse_adapter(name: str, text: str) -> AdapterRef:
    said = json.loads(text)
    if not isinstance(said, list) or not all(isinstance(one, str) for one in said[:3]):
        raise ValueError("is no list of texts")
    return AdapterRef(name, *said[:3])
