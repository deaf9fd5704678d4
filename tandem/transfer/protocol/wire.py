"""Messages of a link: headers of 80 bytes, each with the body it announces.

    header   magic version kind | link nonce | transfer | layer, first block, blocks | length, offset | payload's sum
             source | extent | the header's own sum
    body     `length` bytes after the header; or, if `offset` is not INLINE, at that offset of the transport's memory

The header holds the payload's xxh3_64, and the header's own xxh3_64 covers that sum too. A header with a wrong sum ends
the link, because the stream cannot be followed any more; a payload with a wrong sum fails one transfer.

Peers of different versions refuse each other: a header of any version but VERSION ends the link, HELLO's first of all.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from xxhash import xxh3_64_intdigest

from tandem.block_hash import HASH_BYTES
from tandem.liveness import Liveness, Vitals
from tandem.security import ClusterSecret
from tandem.transfer.protocol.endpoint import LinkPeer, TransferError

MAGIC = b"TDKV"
VERSION = 6
INLINE = 2**64 - 1
MAX_CONTROL_BYTES = 1 << 20
MAX_FETCHED_BLOCKS = 1 << 14  # the names that fit into one message

_FIELDS = struct.Struct("<4sBBxxQQIIIIQQBxHHHHHH2x")
_SUM = struct.Struct("<Q")
HEADER_BYTES = _FIELDS.size + _SUM.size

Bytes = bytes | memoryview
Checksum = int | Callable[[], int | None]  # or a function that returns it once known, and None before


class Kind(IntEnum):
    HELLO = 1
    WELCOME = 2
    REFUSE = 3
    PROBE = 4
    PROBE_ACK = 5
    BEGIN = 6
    FRAME = 7
    COMMIT = 8
    ABORT = 9
    ACK = 10  # every frame of the transfer has been verified
    NACK = 11  # the transfer failed at the receiver
    PING = 12
    PONG = 13
    OPEN = 14  # what the sender's transport says to the receiver's, where it says anything: ahead of its payloads
    FETCH = 15  # the receiver is asked to push cached blocks, over a link of its own


PAYLOAD_KINDS = frozenset({Kind.PROBE, Kind.FRAME})


class KVSource(IntEnum):
    """The origin of a transfer's blocks. COMPUTE: a prefill, even if some of its blocks were cached."""

    COMPUTE = 0
    CACHE = 1
    TIER = 2


class Extent(NamedTuple):
    """The part of a block that a frame has: of layer group `group`, `num_layers` layers from the message's `layer` on,
    and of these the heads [first_head, first_head + num_heads), all if 0. The frame belongs to part `part` of the
    transfer's `parts`; each part comes over its own link."""

    group: int = 0
    num_layers: int = 1
    first_head: int = 0
    num_heads: int = 0
    part: int = 0
    parts: int = 1


WHOLE = Extent()  # all heads of one layer that sees all tokens, from a worker of one rank
NEAR = Extent(group=1)  # the same of a layer with a window


@dataclass(slots=True)
class LinkMessage:
    """One header and its body. `handle` is the link's own number for a transfer (or a probe)."""

    kind: Kind
    nonce: int = 0
    handle: int = 0
    layer: int = 0
    first_block: int = 0
    num_blocks: int = 0
    length: int = 0
    offset: int = INLINE
    payload_sum: int = 0
    source: KVSource = KVSource.COMPUTE
    extent: Extent = WHOLE
    body: Bytes = b""
    slot: int = -1  # the sender's slot that holds the payload; not sent
    later: Callable[[], int | None] | None = None  # returns payload_sum once the payload is ready, None before

    def header(self) -> bytes:
        """The bytes that go ahead of an inline body."""
        fields = _FIELDS.pack(
            MAGIC, VERSION, self.kind, self.nonce, self.handle, self.layer, self.first_block, self.num_blocks,
            self.length, self.offset, self.payload_sum, self.source, *self.extent,
        )  # fmt: skip
        return fields + _SUM.pack(xxh3_64_intdigest(fields))

    @property
    def ready(self) -> bool:
        """True once the message may be written: its payload lies in its slot, and its sum is known."""
        later = self.later  # another thread may run this at the same time
        if later is not None and (found := later()) is not None:
            self.payload_sum, self.later = found, None
        return self.later is None

    @property
    def inline_bytes(self) -> int:
        """The bytes of body that follow the header on the stream."""
        return self.length if self.offset == INLINE else 0


def control(kind: Kind, body: bytes = b"", *, nonce: int = 0, handle: int = 0) -> LinkMessage:
    """A message whose body is small and travels inline."""
    if len(body) > MAX_CONTROL_BYTES:
        raise ValueError(f"{kind.name} body: {len(body)} bytes, at most {MAX_CONTROL_BYTES} are allowed")
    return LinkMessage(kind, nonce, handle, length=len(body), payload_sum=checksum(body), body=body)


def parse_header(data: Bytes) -> LinkMessage:
    """The message that the header at the beginning of `data` announces, its body still empty. Raises TransferError: the
    stream is lost."""
    fields, version = bytes(data[: _FIELDS.size]), data[len(MAGIC)]
    if not fields.startswith(MAGIC) or version != VERSION:
        text = f"a damaged frame header, or wire version {version}, where {VERSION} is spoken here"
        raise TransferError("DATA_LOSS", f"{text}: the stream cannot be followed any more")
    (seen,) = _SUM.unpack(data[_FIELDS.size : HEADER_BYTES])
    if seen != checksum(fields):
        raise TransferError("DATA_LOSS", "a damaged frame header: the stream cannot be followed any more")
    _, _, kind, *rest = _FIELDS.unpack(fields)
    source, extent = rest[-len(WHOLE) - 1], rest[-len(WHOLE) :]
    if kind not in Kind._value2member_map_ or source not in KVSource._value2member_map_:
        raise TransferError("FAILED_PRECONDITION", f"unknown kind {kind} or source {source}")
    message = LinkMessage(Kind(kind), *rest[: -len(WHOLE) - 1])
    message.source, message.extent = KVSource(source), Extent(*extent)
    return message


def checksum(data: Bytes) -> int:
    return xxh3_64_intdigest(data)


def link_nonce(sender: LinkPeer, receiver: LinkPeer, sender_nonce: int, receiver_nonce: int) -> int:
    """Returns the number that only messages between these two incarnations on this one link carry."""
    text = "\0".join((sender.incarnation, receiver.incarnation, str(sender_nonce), str(receiver_nonce)))
    return xxh3_64_intdigest(text.encode())


class ControlBody(BaseModel):
    """The body of a control message: JSON with validated fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    def packed(self) -> bytes:
        return self.model_dump_json().encode()


class Hello(ControlBody):
    """Body of HELLO. receiver: the peer that the sender means to reach. offers: each transport's offer, best first.

    proof: proves that a sender with the cluster's secret wrote the other fields; empty if there is no secret.
    """

    sender: LinkPeer
    receiver: LinkPeer
    nonce: int
    offers: dict[str, dict[str, Any]]
    proof: str = ""


class Welcome(ControlBody):
    """Body of WELCOME. transport: the first of the sender's that works here. refused: why those before it do not.

    proof: proves that a receiver with the cluster's secret wrote the other fields in answer to this HELLO.
    """

    receiver: LinkPeer
    nonce: int
    transport: str
    refused: dict[str, str]
    num_layers: int
    block_bytes: int
    max_frame_bytes: int
    proof: str = ""


class Begin(ControlBody):
    """Body of BEGIN: announces blocks [first_block, first_block + num_blocks) of each of `num_layers` layers."""

    transfer_id: str
    first_block: int
    num_blocks: int
    num_layers: int


class Fetch(ControlBody):
    """Body of FETCH: asks the peer to push the blocks of `names` (hexadecimal, joined), up to the first that is not
    cached, within `timeout_ms`, to the receiver at `address` of FETCH's sender, as blocks 0, 1 … of this transfer."""

    transfer_id: str
    address: str
    timeout_ms: int = Field(ge=1)
    names: str

    @classmethod
    def of(cls, transfer_id: str, address: str, timeout_s: float, names: Sequence[bytes]) -> Fetch:
        asked = b"".join(names[:MAX_FETCHED_BLOCKS]).hex()
        return cls(transfer_id=transfer_id, address=address, timeout_ms=max(1, int(timeout_s * 1000)), names=asked)

    def block_names(self) -> list[bytes]:
        """Returns the names of the blocks. Raises TransferError(DATA_LOSS) if they are not hexadecimal."""
        try:
            data = bytes.fromhex(self.names)
        except ValueError:
            raise TransferError("DATA_LOSS", "Fetch: bad names") from None
        return [data[i : i + HASH_BYTES] for i in range(0, len(data), HASH_BYTES)]


class Pulse(ControlBody):
    """Body of PING. starvation: that of its sender. is_sole: no other worker could take its sender's place.

    unheard_s: the seconds for which its sender has heard nothing from the other side.
    """

    starvation: float = Field(ge=0)
    is_sole: bool
    unheard_s: float = Field(ge=0)


class Failure(ControlBody):
    """Body of REFUSE, ABORT and NACK."""

    code: str
    message: str

    def error(self) -> TransferError:
        return TransferError(self.code, self.message)


def pulse_of(vitals: Vitals, unheard_s: float = 0.0) -> bytes:
    return Pulse(starvation=vitals.starvation(), is_sole=vitals.is_sole(), unheard_s=unheard_s).packed()


def take_pulse(ping: LinkMessage, liveness: Liveness, now: float) -> None:
    """Notes what the body of a PING says. Raises TransferError(DATA_LOSS)."""
    pulse = parse(Pulse, ping.body)
    liveness.heard(pulse.starvation, now)
    liveness.sole, liveness.unheard_s = pulse.is_sole, pulse.unheard_s


B = TypeVar("B", bound=ControlBody)
G = TypeVar("G", Hello, Welcome)


def proven(greeting: G, secret: ClusterSecret, to: str = "") -> G:
    """Returns the greeting with its proof. `to`: for a WELCOME, the proof of the HELLO that it answers."""
    return greeting.model_copy(update={"proof": secret.proof(f"{type(greeting).__name__} {to}", _unproven(greeting))})


def check_proof(greeting: Hello | Welcome, secret: ClusterSecret, to: str = "") -> None:
    """Checks a greeting's proof. Raises TransferError(UNAUTHENTICATED)."""
    kind = type(greeting).__name__
    if not secret.proves(greeting.proof, f"{kind} {to}", _unproven(greeting)):
        raise TransferError("UNAUTHENTICATED", f"{kind}: the peer does not have the cluster's secret")


def _unproven(greeting: Hello | Welcome) -> bytes:
    return greeting.model_copy(update={"proof": ""}).packed()


def parse(body: type[B], data: Bytes | dict[str, Any]) -> B:
    """Parses a control body. Raises TransferError(DATA_LOSS) naming the fields that are wrong."""
    try:
        return body.model_validate(data) if isinstance(data, dict) else body.model_validate_json(bytes(data))
    except ValidationError as error:
        fields = ", ".join(".".join(map(str, problem["loc"])) or "body" for problem in error.errors())
        raise TransferError("DATA_LOSS", f"{body.__name__}: bad {fields}") from None
