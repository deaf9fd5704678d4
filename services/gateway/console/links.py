"""KV links and their traffic: prefill workers are asked while a console is open, at most once in EVERY_S."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from math import inf
from typing import Any

from services.gateway.errors import GatewayError
from services.gateway.generation import BackgroundTasks
from services.gateway.workers import WorkerConnection
from tandem.registry import Role
from tandem.v1 import prefill_pb2

EVERY_S = 2.0
ANSWER_WAIT_S = 1.0
MAX_WORKERS = 128
MAX_LINKS = 10_000


class LinkBook:
    def __init__(self, connected: Callable[[], list[WorkerConnection]]) -> None:
        self._connected = connected
        self._background = BackgroundTasks()
        self._asked_at = -inf
        self._links: dict[str, list[dict[str, Any]]] = {}  # by prefill worker, as last reported

    def look(self) -> list[dict[str, Any]]:
        """Returns the links as last reported; asks again in the background if that is long ago."""
        now = asyncio.get_running_loop().time()
        if now >= self._asked_at + EVERY_S and not self._background:
            self._asked_at = now
            self._background(self._ask())
        return [link for links in self._links.values() for link in links][:MAX_LINKS]

    async def _ask(self) -> None:
        prefills = [one for one in self._connected() if one.info.role is Role.PREFILL][:MAX_WORKERS]
        answers = await asyncio.gather(*map(self._ask_one, prefills))
        self._links = dict(sorted((one.info.worker_id, links) for one, links in zip(prefills, answers, strict=True)))

    async def _ask_one(self, connection: WorkerConnection) -> list[dict[str, Any]]:
        """Returns a worker's links; none if it does not answer."""
        name, request = connection.info.worker_id, prefill_pb2.ListLinksRequest()
        try:
            answer = await connection.call(connection.prefill.ListLinks, request, timeout=ANSWER_WAIT_S)
        except GatewayError:
            return []
        return [
            {
                "prefill": name, "decode": link.decode_worker, "incarnation": link.decode_incarnation,
                "up": link.healthy, "transport": link.transport, "carrier": link.carrier, "refused": link.refused,
                "bytes": link.bytes, "transfers": link.transfers, "failures": link.failures,
                "bytes_per_s": round(link.bytes / link.busy_s) if link.busy_s else None,
            }
            for link in answer.links
        ]  # fmt: skip
