"""Names that a cluster serves besides its models, one list for all gateways: LoRA adapters, aliases."""

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
    """`epoch` changes when Redis has lost its memory; empty when it has none yet."""

    epoch: str
    by_name: dict[str, T]


class NamedList(Generic[T]):
    """Each call returns all that there are then. What is malformed, or of a newer version, is not there."""

    def __init__(
        self, connection: RegistryConnection, unreadable: UnreadableRows, kind: str, parse: Callable[[str, str], T],
        text: Callable[[T], str],
    ) -> None:  # fmt: skip
        """`parse`: makes one of its name and its text; raises ValueError."""
        self._connection, self._kind, self._parse, self._text = connection, kind, parse, text
        self._unreadable = unreadable

    async def all(self) -> Named[T]:
        return await self._call()

    async def put(self, name: str, one: T) -> Named[T]:
        """Serve it; another one of that name no longer."""
        return await self._call("put", name, self._text(one))

    async def restore(self, known: Mapping[str, T]) -> Named[T]:
        """Serve those whose names are unknown: Redis has lost its memory."""
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
