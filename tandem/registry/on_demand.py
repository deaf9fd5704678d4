"""Models that have workers only while clients ask for them: what launchers and gateways report to each other.

    launcher ── tell: asleep, starting, awake … ──> Redis <── ask: ran 2 s ago, is wanted now ── gateways

A launcher's report holds for its `ttl`. A gateway reports how long ago its models ran and were wanted.
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
    ASLEEP = "asleep"  # the model starts when it is wanted
    STARTING = "starting"
    AWAKE = "awake"
    STOPPING = "stopping"  # requests that come now wait until the model starts again
    FAILED = "failed"  # the start failed; the model can be wanted again after `left_s`


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """A launcher's report on one of its models."""

    name: str
    state: Wakefulness
    left_s: float = 0.0  # seconds until the model would be awake if it is wanted now
    start_s: float = 0.0  # seconds that its last start took; 0: it has not started yet
    reason: str = ""  # why the start failed, or what it waits for

    @classmethod
    def of(cls, name: str, text: str) -> ModelStatus:
        """Parses a launcher's report.

        Raises:
            MISREAD: the text is malformed.
        """
        said = json.loads(text)
        status = cls(**said | {"state": Wakefulness(said.get("state"))})
        times = status.left_s, status.start_s
        if status.name != name or not isinstance(status.reason, str) or not all(0 <= one < NEVER for one in times):
            raise ValueError(f"is not said of {name[:64]!r}, or times are none")
        return status


@dataclass(frozen=True, slots=True)
class ModelUse:
    """A gateway's report on one model: seconds since one of its answers ran, and since a request waited for it."""

    ran_s: float = NEVER
    wanted_s: float = NEVER


class OnDemandModels:
    """Reports between launchers and gateways. Calls may raise RegistryUnavailable."""

    def __init__(self, connection: RegistryConnection, unreadable: UnreadableRows) -> None:
        self._connection, self._unreadable = connection, unreadable

    async def tell(self, statuses: Iterable[ModelStatus], ttl: float) -> dict[str, ModelUse]:
        """Publishes a launcher's reports for `ttl` seconds. Returns each model's use at all gateways."""
        said = ((one.name, json.dumps(asdict(one))) for one in statuses)
        flat = await self._connection.call("on_demand", "tell", max(1, round(1000 * ttl)), *chain.from_iterable(said))
        uses = (ModelUse(_seconds(ran), _seconds(wanted)) for ran, wanted in zip(flat[1::3], flat[2::3], strict=True))
        return dict(zip(flat[::3], uses, strict=True))

    async def ask(self, uses: Mapping[str, ModelUse]) -> dict[str, ModelStatus]:
        """Publishes a gateway's reports. Returns launchers' reports, without malformed or newer versions' ones."""
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
