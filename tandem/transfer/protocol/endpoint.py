"""Who is at each end of a link, and how a transfer fails."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.liveness import QUIET, Vitals
from tandem.security import NO_SECRET, ClusterSecret


@dataclass(frozen=True)
class LinkPeer:
    """One start of one worker. `layout_hash` names the shape and dtype of its KV blocks."""

    worker_id: str
    incarnation: str
    layout_hash: str

    def __str__(self) -> str:
        return f"{self.worker_id}/{self.incarnation}"


@dataclass(frozen=True)
class LocalPeer:
    """This end of its links: its identity, the secret that proves it, and the vitals that its pings tell."""

    identity: LinkPeer
    secret: ClusterSecret = NO_SECRET
    vitals: Vitals = QUIET


@dataclass(frozen=True)
class FrameShape:
    """Sizes that a receiver tells its sender: layers, bytes of one block of a layer, and of the largest frame."""

    num_layers: int
    block_bytes: int
    max_frame_bytes: int


class TransferError(Exception):
    """A link or a transfer failed.

    code: a gRPC status name. UNAVAILABLE: the peer or the link is gone, or never answered. DEADLINE_EXCEEDED: the
    transfer's own time ran out. DATA_LOSS: bytes were damaged or missing. FAILED_PRECONDITION: the two sides disagree.
    ABORTED: one side gave up. UNAUTHENTICATED: the peer is a stranger. RESOURCE_EXHAUSTED: the receiver has all the
    links it will have.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message

    def fresh(self) -> TransferError:
        """The same failure, to raise once more: a raised exception keeps its frames, and what they hold, alive."""
        return TransferError(self.code, self.message)
