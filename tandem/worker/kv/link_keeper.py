"""The task that keeps links to every worker of the other role.

    a worker appears in the view          --> open (handshake, warm, probe) --> its incarnation is published as linked
    the link dies, or it started again    --> close, unpublish
    its lease is gone and the link works  --> keep for `grace_s`: a late heartbeat, or Redis has lost its data

A push or a fetch that finds no link opens it itself, so a worker restarted a moment ago serves its first request, and
workers of one role fetch from each other. Such a link stays until one of them ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from tandem.liveness import MOST_S
from tandem.registry import ClusterView, Distance, LiveWorker, Location, Role, WorkerInfo
from tandem.transfer import Link, LinkPeer, Sender

OPEN_TIMEOUT_S = 1.5
CLOSE_WAIT_S = 2.0

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class LinkState:
    """A worker of the other role, and the healthy link to it; or None and why there is no link."""

    peer: WorkerInfo
    link: Link | None
    refused: str


def fell_back(link: Link) -> bool:
    """True if a preferred transport failed, or NCCL has no fast path. A refused `shm` is no failure: it does not reach
    other machines.
    """
    return bool(link.refused.keys() - {"shm"}) or "NET/Socket" in link.carrier


class LinkKeeper:
    """Keeps links to all workers of the role `others`. `changed` is called when the set of healthy links changes."""

    def __init__(
        self, sender: Sender, view: ClusterView, location: Location, layout_hash: str, others: Role,
        changed: Callable[[], None],
    ) -> None:  # fmt: skip
        self._sender = sender
        self._view = view
        self._layout_hash = layout_hash
        self._location, self._others = location, others
        self._changed = changed
        self._peers: dict[str, WorkerInfo] = {}
        self._locations: dict[str, Location] = {}  # of workers of both roles
        self._absent_since: dict[str, float] = {}
        self._opening: dict[str, asyncio.Task[Link]] = {}
        self._refused: dict[str, str] = {}
        self._published: tuple[str, ...] = ()
        # True if this worker, or a peer, is the only one of its role with this KV layout: no other could take over.
        self.is_sole = self.has_sole_peer = False

    def linked(self) -> tuple[str, ...]:
        """Returns the incarnations of the peers with a healthy link."""
        return self._published

    def report(self) -> list[LinkState]:
        """Returns the known peers of the same KV layout, by name. From any thread."""
        known = sorted((name, info) for name, info in self._peers.items() if info.layout_hash == self._layout_hash)
        return [
            LinkState(info, self._sender.link(name, info.incarnation), self._refused.get(info.incarnation, ""))
            for name, info in known
        ]

    def distance_to(self, worker_id: str) -> Distance:
        """Returns the distance to a worker; FAR if its location is unknown."""
        return self._location.distance_to(self._locations[worker_id]) if worker_id in self._locations else Distance.FAR

    def peer(self, worker_id: str) -> WorkerInfo | None:
        return self._peers.get(worker_id)

    async def keep(self, every_s: float = 0.25, grace_s: float = 3.0) -> None:
        """Follows the view until cancelled. A worker that is absent from the view for `grace_s` is unlinked even if it
        answers; if all are absent, after MOST_S.
        """
        while True:
            self._follow(self._view.workers, grace_s)
            self._publish()
            await self._view.wait_changed(every_s)

    async def link_to(self, remote: LinkPeer, address: str) -> Link:
        """Returns the link to this incarnation, and opens it if necessary.

        Raises:
            TransferError: the link cannot be opened; the error has the reason.
        """
        link = self._sender.link(remote.worker_id, remote.incarnation)
        if link is not None:
            return link
        return await asyncio.shield(self._open(remote, address))

    def _open(self, remote: LinkPeer, address: str) -> asyncio.Task[Link]:
        """Returns the task that opens a link within OPEN_TIMEOUT_S. There is at most one task per incarnation."""
        task = self._opening.get(remote.incarnation)
        if task is None:
            task = asyncio.create_task(self._opening_link(remote, address))
            self._opening[remote.incarnation] = task
            task.add_done_callback(lambda done: self._opened(remote, done))
        return task

    async def _opening_link(self, remote: LinkPeer, address: str) -> Link:
        return await asyncio.wrap_future(self._sender.open_link(remote, address, timeout_s=OPEN_TIMEOUT_S))

    def _opened(self, remote: LinkPeer, task: asyncio.Task[Link]) -> None:
        self._opening.pop(remote.incarnation, None)
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            link = task.result()
            (log.warning if fell_back(link) else log.info)(
                "linked", to=remote.worker_id, transport=link.transport, carrier=link.carrier,
                refused=link.refused,
            )  # fmt: skip
            self._refused.pop(remote.incarnation, None)
        elif self._refused.get(remote.incarnation) != str(error):
            if any(info.incarnation == remote.incarnation for info in self._peers.values()):
                self._refused[remote.incarnation] = str(error)
            log.warning("no link", to=remote.worker_id, reason=str(error))
        self._publish()

    def _follow(self, workers: list[LiveWorker], grace_s: float) -> None:
        live = {w.info.worker_id: w.info for w in workers if w.info.role is self._others}
        mine = [w.info.role is not self._others for w in workers if w.info.layout_hash == self._layout_hash]
        self.is_sole, self.has_sole_peer = mine.count(True) <= 1, mine.count(False) <= 1
        grace_s = MOST_S if not live else grace_s
        gone = [info for name, info in self._peers.items() if name not in live]
        spared = {info.worker_id: info for info in gone if self._is_spared(info, grace_s)}
        known = spared | live
        for worker_id, info in self._peers.items():
            if worker_id not in known or known[worker_id].incarnation != info.incarnation:
                self._sender.close_link(worker_id, info.incarnation)
                self._refused.pop(info.incarnation, None)
        self._peers = known
        self._locations = {w.info.worker_id: w.info.location for w in workers} | {
            name: info.location for name, info in spared.items()
        }
        self._absent_since = {name: since for name, since in self._absent_since.items() if name in spared}
        for info in live.values():
            if info.layout_hash != self._layout_hash:
                self._refuse(info)
            elif not self._sender.link(info.worker_id, info.incarnation):
                # The task is not awaited, so that a worker that does not answer does not delay other links.
                self._open(LinkPeer(info.worker_id, info.incarnation, info.layout_hash), info.transfer_address)

    def _is_spared(self, info: WorkerInfo, grace_s: float) -> bool:
        """True while this absent worker's link still works, and it has been absent for less than `grace_s`."""
        now = asyncio.get_running_loop().time()
        since = self._absent_since.setdefault(info.worker_id, now)
        return now - since < grace_s and self._sender.link(info.worker_id, info.incarnation) is not None

    def _refuse(self, info: WorkerInfo) -> None:
        if info.incarnation not in self._refused:
            self._refused[info.incarnation] = "KV layout"
            log.warning(
                "no link: KV layouts differ",
                to=info.worker_id,
                theirs=info.layout_hash,
                ours=self._layout_hash,
            )

    def _publish(self) -> None:
        healthy = tuple(
            sorted(i.incarnation for i in self._peers.values() if self._sender.link(i.worker_id, i.incarnation))
        )
        if healthy != self._published:
            self._published = healthy
            self._changed()
