"""A worker as the registry knows it, and as it is written in Redis.

    info   fixed for one incarnation: where it listens, what it serves
    load   changes with every heartbeat: room and queue
    reserved_*   what gateways hold there for requests, until they release it

In Redis a worker is one hash whose fields are these names; lists are JSON, everything else is plain text, so that Lua
reads a number without parsing a document.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any, NamedTuple, TypeVar

from tandem.registry.location import Location


class Role(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"


class Fallback(StrEnum):
    """Why a route is not what it should be; also a label of the gateway's metrics."""

    NO_LIVE_WORKER = "no_live_worker"  # of the prefill role, as all below
    TOO_LARGE = "too_large"
    EXCLUDED = "excluded"
    DRAINING = "draining"
    KV_LAYOUT = "kv_layout"  # none that a decode worker has
    NO_PROVEN_LINK = "no_proven_link"
    STUCK = "stuck"
    LAST_VIEW = "last_view"  # the registry knows nobody who can take it, the gateway's view does
    REGISTRY_UNAVAILABLE = "registry_unavailable"


class ModelKey(NamedTuple):
    """A model as gateways tell it from others: by its name, and by what makes tokens of its text."""

    name: str
    fingerprint: str

    @property
    def text(self) -> str:
        return f"{self.name}@{self.fingerprint}"


SIZES = ("block_size", "num_blocks", "max_num_seqs", "max_model_len")


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """One incarnation of a worker. Sizes are in tokens or blocks of `block_size` tokens."""

    worker_id: str
    role: Role
    incarnation: str
    grpc_address: str
    transfer_address: str  # host:port of the KV listener
    model: str
    revision: str  # of the weights
    layout_hash: str
    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_model_len: int
    transports: tuple[str, ...]
    host: str
    process: str = ""  # as tandem/liveness/same_host.py names it
    fingerprint: str = ""  # of the files by which its text becomes tokens; empty: no gateway can serve it
    metrics_address: str = ""  # where Prometheus reads it; empty: nowhere
    node: str = ""  # these three: its location
    nvlink_domain: str = ""
    zone: str = ""
    vocab_size: int = 0  # of its logits, which are not its tokenizer's words; 0: it does not say

    @property
    def key(self) -> ModelKey:
        return ModelKey(self.model, self.fingerprint)

    @property
    def location(self) -> Location:
        return Location(self.node, self.nvlink_domain, self.zone)

    def __post_init__(self) -> None:
        for name in ("worker_id", "incarnation", "grpc_address", "model", "revision", "layout_hash"):
            if not getattr(self, name):
                raise ValueError(f"{name} must not be empty")
        for name in SIZES:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in (*SIZES, "vocab_size"):
            if not 0 <= getattr(self, name) <= MOST_SIZE:
                raise ValueError(f"{name} must be from 0 to {MOST_SIZE}, got {getattr(self, name)}")


RATES = (
    "prefill_tokens_per_s", "transfer_tokens_per_s", "zone_transfer_tokens_per_s", "far_transfer_tokens_per_s",
    "step_s",
)  # fmt: skip

COUNTS = ("free_blocks", "num_waiting", "num_running", "queued_tokens", "likely_tokens")


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """A worker's report in a heartbeat. Blocks kept only as prefix cache count as free."""

    free_blocks: int
    num_waiting: int
    num_running: int
    queued_tokens: int  # prompt tokens accepted and not yet computed
    likely_tokens: int = 0  # decode: of an answer, which it takes blocks for in advance; 0: for all that it may have
    draining: bool = False  # finish what you have, take nothing new
    linked: tuple[str, ...] = ()  # prefill: incarnations of decode workers it has moved a block to
    stuck: bool = False  # its engine takes far longer over a step than it ever did of late
    adapters: tuple[str, ...] = ()  # revisions of the LoRA adapters in its memory
    # Measured; 0 is not yet, and a nominal value holds.
    prefill_tokens_per_s: float = 0.0  # prompt tokens prefilled
    transfer_tokens_per_s: float = 0.0  # prefill: tokens whose KV is moved, to peers at each distance: near,
    zone_transfer_tokens_per_s: float = 0.0  # in its zone,
    far_transfer_tokens_per_s: float = 0.0  # and in another
    step_s: float = 0.0  # decode: time of one step of the present batch

    def __post_init__(self) -> None:
        for name in COUNTS:
            if not 0 <= getattr(self, name) <= MOST_LOAD:
                raise ValueError(f"{name} must be a number from 0 up, got {getattr(self, name)}")
        for name in RATES:
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be a number from 0 up, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class LiveWorker:
    """A worker with a live lease."""

    info: WorkerInfo
    load: WorkerLoad
    reserved_tokens: int  # prompt tokens routed here and not yet computed
    reserved_blocks: int  # blocks held for sequences routed here
    generation: str  # of its lease: each one taken has a higher one


@dataclass(frozen=True, slots=True)
class Place:
    """A worker's part in a route."""

    info: WorkerInfo
    cached_tokens: int  # of the prompt, held or expected there


@dataclass(frozen=True, slots=True)
class Route:
    """The workers of one request. `prefill` is None if the decode worker prefills the prompt itself; `holder` is
    known to have more of the prompt cached than the prefill worker, which had better fetch that than compute it."""

    decode: Place
    prefill: Place | None
    holder: Place | None
    reservation_id: str
    reason: str
    fallback: Fallback | None  # None: it went the way it should

    @classmethod
    def of(cls, places: Sequence[Place], reservation_id: str, why: str, fallback: Fallback | None) -> Route:
        """`places`: to decode, to prefill if that is another, to fetch from if there is one.

        Its reason says the path, the cached tokens and why.
        """
        decode, (prefill, holder) = places[0], [*places[1:], None, None][:2]
        if prefill is None:
            reason = f"local prefill: {why}; {decode.cached_tokens} prompt tokens cached at decode"
        else:
            cached = f"{prefill.cached_tokens} prompt tokens cached there, {decode.cached_tokens} at decode"
            if holder is not None:
                cached += f", {holder.cached_tokens} to be had from {holder.info.worker_id}"
            reason = f"remote prefill: {cached}; {why}"
        return cls(decode, prefill, holder, reservation_id, reason, fallback)


T = TypeVar("T", WorkerInfo, WorkerLoad)
# Beyond these a number is none that a worker counts.
MOST_SIZE, MOST_LOAD = 2**31 - 1, 2**53
ADDRESS = re.compile(r"[^\x00-\x1f\x7f\ufffd]+:\d+")


def _listed(text: str) -> tuple[str, ...]:
    found = json.loads(text)
    if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
        raise ValueError("is no list of texts")
    return tuple(found)


# By the type of a field: how its text is read back.
READ: Mapping[str, Callable[[str], Any]] = {
    "str": str,
    "int": int,
    "float": float,
    "bool": lambda text: text == "1",
    "Role": Role,
    "tuple[str, ...]": _listed,
}


def encode(part: WorkerInfo | WorkerLoad) -> list[str]:
    """Name, value, name, value … as written in the worker's hash."""
    return [text for field in fields(part) for text in (field.name, _write(getattr(part, field.name)))]


def decode(worker_id: str, flat: Sequence[str]) -> LiveWorker:
    """The worker of one hash, given as name, value, name, value …

    Raises:
        MISREAD: it is no worker's, or not this one's.
    """
    row = dict(zip(flat[::2], flat[1::2], strict=True))
    reserved = int(row["reserved_tokens"]), int(row["reserved_blocks"])
    info, load = _read(WorkerInfo, row), _read(WorkerLoad, row)
    if info.worker_id != worker_id:
        raise ValueError(f"worker_id is {info.worker_id[:64]!r}")
    for name in ("grpc_address", "transfer_address", "metrics_address"):
        if (address := getattr(info, name)) and not ADDRESS.fullmatch(address):
            raise ValueError(f"{name} is {address[:64]!r}")
    if not 0 < int(row["generation"]) < MOST_LOAD:
        raise ValueError(f"generation is {row['generation'][:64]!r}")
    return LiveWorker(info, load, *reserved, row["generation"])


def _write(value: object) -> str:
    if isinstance(value, tuple):
        return json.dumps(value)
    return str(int(value)) if isinstance(value, bool) else str(value)


def _read(kind: type[T], row: Mapping[str, str]) -> T:
    """Fields that a worker of an older version does not say are as if they were not known."""
    known = (field for field in fields(kind) if field.name in row)
    return kind(**{field.name: READ[str(field.type)](row[field.name]) for field in known})
