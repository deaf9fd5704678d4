"""The peers at the two ends of a link, and the error with which a transfer fails."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from tandem.liveness import QUIET, Vitals
from tandem.security import NO_SECRET, ClusterSecret


@dataclass(frozen=True)
class LinkPeer:
    """A single start of a worker. `layout_hash` names the shape and dtype of its KV blocks."""

    worker_id: str
    incarnation: str
    layout_hash: str

    def __str__(self) -> str:
        return f"{self.worker_id}/{self.incarnation}"


class NearLayers(NamedTuple):
    """The layers with a window. Of these a transfer has only the last `moved` blocks, and the receiver's cache has
    places of their own, of another number. Both follow from the layout."""

    layers: frozenset[int] = frozenset()
    moved: int = 0

    def first(self, layer: int, first_block: int, end: int) -> int:
        """Returns the first block that a transfer of blocks `first_block` … `end` has of a layer."""
        return max(first_block, end - self.moved) if layer in self.layers else first_block


ALL_FAR = NearLayers()


@dataclass(frozen=True)
class LocalPeer:
    """The worker at this end of links: its identity, the secret that proves it, the vitals that its pings report, the
    layers with a window in its layout."""

    identity: LinkPeer
    secret: ClusterSecret = NO_SECRET
    vitals: Vitals = QUIET
    near: NearLayers = ALL_FAR


@dataclass(frozen=True)
class FrameShape:
    """The sizes that a receiver reports to a sender: layers, bytes of one block of a layer, bytes of the largest
    frame.
    """

    num_layers: int
    block_bytes: int
    max_frame_bytes: int


class TransferError(Exception):
    """A link or a transfer failed.

    code: a gRPC status name. UNAVAILABLE: the peer or the link is gone, or never answered. DEADLINE_EXCEEDED: the
    transfer's own time ran out. DATA_LOSS: bytes were damaged or missing. FAILED_PRECONDITION: the two sides disagree.
    ABORTED: one side gave up. UNAUTHENTICATED: the peer does not know the cluster's secret. RESOURCE_EXHAUSTED: the
    receiver has as many links as it takes.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message

    def fresh(self) -> TransferError:
        """Returns a copy to raise: an exception raised before keeps its stack frames and their objects alive."""
        return TransferError(self.code, self.message)
