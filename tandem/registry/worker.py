"""A worker's record in the registry, and its format in Redis.

    info   fixed for one incarnation: where it listens, what it serves
    load   changes with every heartbeat: room and queue
    reserved_*   what gateways have reserved there for requests

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
    """Why a request was not routed as its policy asks; also a label of the gateway's metrics."""

    NO_LIVE_WORKER = "no_live_worker"  # no live prefill worker; all reasons below are about prefill workers, too
    TOO_LARGE = "too_large"
    EXCLUDED = "excluded"
    DRAINING = "draining"
    KV_LAYOUT = "kv_layout"  # no decode worker has their KV layout
    NO_PROVEN_LINK = "no_proven_link"
    STUCK = "stuck"
    LAST_VIEW = "last_view"  # the registry has no worker that can take the request, but the gateway's view has
    REGISTRY_UNAVAILABLE = "registry_unavailable"


class ModelKey(NamedTuple):
    """The identity of a model for gateways: its name, and the fingerprint of its tokenizer's files."""

    name: str
    fingerprint: str

    @property
    def text(self) -> str:
        return f"{self.name}@{self.fingerprint}"


SIZES = ("block_size", "num_blocks", "max_num_seqs", "max_model_len", "tensor_parallel")


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """An incarnation of a worker. Sizes are in tokens or blocks of `block_size` tokens."""

    worker_id: str
    role: Role
    incarnation: str
    grpc_address: str
    transfer_address: str  # host:port of the KV listener
    model: str
    revision: str  # the weights' revision
    layout_hash: str
    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_model_len: int
    transports: tuple[str, ...]
    host: str
    process: str = ""  # the process's name by tandem/liveness/same_host.py
    fingerprint: str = ""  # the fingerprint of the tokenizer's files; empty: no gateway can serve it
    metrics_address: str = ""  # where Prometheus scrapes it; empty: nowhere
    node: str = ""  # node, NVLink domain and zone are its location
    nvlink_domain: str = ""
    zone: str = ""
    vocab_size: int = 0  # the size of its logits, which may differ from the tokenizer's; 0: unknown
    kept_blocks: int = 0  # blocks that its tiers below the cache can keep
    tensor_parallel: int = 1  # ranks: processes that compute its steps together

    @property
    def key(self) -> ModelKey:
        return ModelKey(self.model, self.fingerprint)

    @property
    def title(self) -> str:
        """Returns its name for people, with the number of its ranks if there are several."""
        return self.worker_id + (f" (TP {self.tensor_parallel})" if self.tensor_parallel > 1 else "")

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
        for name in (*SIZES, "vocab_size", "kept_blocks"):
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
    likely_tokens: int = 0  # decode: tokens of an answer that it reserves blocks for; 0: for the longest answer
    draining: bool = False  # it finishes its sequences and takes no new ones
    linked: tuple[str, ...] = ()  # prefill: incarnations of the decode workers that it has moved a block to
    stuck: bool = False  # its engine's step takes far longer than recent ones
    adapters: tuple[str, ...] = ()  # revisions of the LoRA adapters in its memory
    # Measured rates; 0: not measured yet, and a nominal value counts.
    prefill_tokens_per_s: float = 0.0  # prompt tokens prefilled
    transfer_tokens_per_s: float = 0.0  # prefill: tokens whose KV is moved to near peers
    zone_transfer_tokens_per_s: float = 0.0  # the same, to other peers in its zone
    far_transfer_tokens_per_s: float = 0.0  # the same, to peers in another zone
    step_s: float = 0.0  # decode: seconds of one step of the present batch

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
    generation: str  # its lease's generation: each new lease has a higher one


@dataclass(frozen=True, slots=True)
class Place:
    """A worker's part in a route."""

    info: WorkerInfo
    cached_tokens: int  # prompt tokens that it holds, or is expected to hold


@dataclass(frozen=True, slots=True)
class Route:
    """The workers of one request. `prefill` is None if the decode worker prefills the prompt itself; `holder` has
    more of the prompt cached than the worker that prefills, which should fetch that rather than compute it."""

    decode: Place
    prefill: Place | None
    holder: Place | None
    reservation_id: str
    reason: str
    fallback: Fallback | None  # None: the route is what the policy asks for

    @classmethod
    def of(
        cls,
        decode: Place,
        prefill: Place | None,
        holder: Place | None,
        reservation_id: str,
        why: str,
        fallback: Fallback | None,
    ) -> Route:
        """Makes a route, whose reason names the path, the cached tokens and `why`."""
        fetched = f", {holder.cached_tokens} to be had from {holder.info.worker_id}" if holder else ""
        if prefill is None:
            reason = f"local prefill: {why}; {decode.cached_tokens} prompt tokens cached at decode{fetched}"
        else:
            cached = f"{prefill.cached_tokens} prompt tokens cached there, {decode.cached_tokens} at decode{fetched}"
            reason = f"remote prefill: {cached}; {why}"
        return cls(decode, prefill, holder, reservation_id, reason, fallback)


T = TypeVar("T", WorkerInfo, WorkerLoad)
# The largest size, and the largest load, that is accepted of a worker.
MOST_SIZE, MOST_LOAD = 2**31 - 1, 2**53
ADDRESS = re.compile(r"[^\x00-\x1f\x7f\ufffd]+:\d+")


def _listed(text: str) -> tuple[str, ...]:
    found = json.loads(text)
    if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
        raise ValueError("is no list of texts")
    return tuple(found)


# The parser of each type of field.
READ: Mapping[str, Callable[[str], Any]] = {
    "str": str,
    "int": int,
    "float": float,
    "bool": lambda text: text == "1",
    "Role": Role,
    "tuple[str, ...]": _listed,
}


def encode(part: WorkerInfo | WorkerLoad) -> list[str]:
    """Returns name, value, name, value … to write to the worker's hash."""
    return [text for field in fields(part) for text in (field.name, _write(getattr(part, field.name)))]


def decode(worker_id: str, flat: Sequence[str]) -> LiveWorker:
    """Returns the worker of a hash, given as name, value, name, value …

    Raises:
        MISREAD: the hash is malformed, or is another worker's.
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
    """Parses info or load. Fields that an older version does not write get their defaults."""
    known = (field for field in fields(kind) if field.name in row)
    return kind(**{field.name: READ[str(field.type)](row[field.name]) for field in known})
