"""Models that have workers only while they are asked for: their launcher's word for gateways, and theirs for it.

    launcher ── tell: asleep, starting, awake … ──> Redis <── ask: ran 2 s ago, is wanted now ── gateways

Either's word ends with it: what a launcher said holds for its `ttl`, and a gateway's is only how long ago it was.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import partial
from itertools import chain

from tandem.registry.wire import Argument, RegistryConnection, UnreadableRows

NEVER = float("inf")


class Wakefulness(StrEnum):
    ASLEEP = "asleep"  # starts when it is wanted
    STARTING = "starting"
    AWAKE = "awake"
    STOPPING = "stopping"  # what comes now waits until it starts again
    FAILED = "failed"  # its start; it may be wanted again once `left_s` is over


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """A launcher's word for one of its models."""

    name: str
    state: Wakefulness
    left_s: float = 0.0  # until it is awake, should it be wanted now
    start_s: float = 0.0  # of its last start; 0: there was none
    reason: str = ""  # why it failed, or what it waits for

    @classmethod
    def of(cls, name: str, text: str) -> ModelStatus:
        """
        Raises:
            MISREAD: a launcher wrote no such text.
        """
        said = json.loads(text)
        status = cls(**said | {"state": Wakefulness(said.get("state"))})
        times = status.left_s, status.start_s
        if status.name != name or not isinstance(status.reason, str) or not all(0 <= one < NEVER for one in times):
            raise ValueError(f"is not said of {name[:64]!r}, or times are none")
        return status


@dataclass(frozen=True, slots=True)
class ModelUse:
    """A gateway's word for one of them: seconds since an answer of it ran, and since a request waited for it."""

    ran_s: float = NEVER
    wanted_s: float = NEVER


class OnDemandModels:
    """Both sides of it. Calls may raise RegistryUnavailable."""

    def __init__(self, connection: RegistryConnection, unreadable: UnreadableRows) -> None:
        self._connection, self._unreadable = connection, unreadable

    async def tell(self, statuses: Iterable[ModelStatus], ttl: float) -> dict[str, ModelUse]:
        """A launcher's: holds for `ttl` seconds. Returns how each was used at all gateways."""
        said = ((one.name, json.dumps(asdict(one))) for one in statuses)
        flat = await self._connection.call("on_demand", "tell", max(1, round(1000 * ttl)), *chain.from_iterable(said))
        uses = (ModelUse(_seconds(ran), _seconds(wanted)) for ran, wanted in zip(flat[1::3], flat[2::3], strict=True))
        return dict(zip(flat[::3], uses, strict=True))

    async def ask(self, uses: Mapping[str, ModelUse]) -> dict[str, ModelStatus]:
        """A gateway's. Returns what launchers say; what is malformed, or of a newer version, is not there."""
        said: list[Argument] = []
        for name, use in uses.items():
            said += name, _ms(use.ran_s), _ms(use.wanted_s)
        flat = await self._connection.call("on_demand", "ask", *said)
        rows = ((name, partial(ModelStatus.of, name, text)) for name, text in zip(flat[::2], flat[1::2], strict=True))
        return self._unreadable.read_each("on_demand", rows)


def _ms(seconds: float) -> int:
    return -1 if seconds == NEVER else max(0, round(1000 * seconds))


def _seconds(ms: int) -> float:
    return NEVER if ms < 0 else ms / 1000
