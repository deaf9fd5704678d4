from tandem.v1 import worker_pb2 as _worker_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PrefillRequest(_message.Message):
    __slots__ = ("sequence", "ticket")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    sequence: _worker_pb2.SequenceSpec
    ticket: _worker_pb2.LandingTicket
    def __init__(self, sequence: _Optional[_Union[_worker_pb2.SequenceSpec, _Mapping]] = ..., ticket: _Optional[_Union[_worker_pb2.LandingTicket, _Mapping]] = ...) -> None: ...

class PrefillResponse(_message.Message):
    __slots__ = ("output", "transfer_bytes", "transport", "queue_ms", "compute_ms")
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_BYTES_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_MS_FIELD_NUMBER: _ClassVar[int]
    output: _worker_pb2.SequenceOutput
    transfer_bytes: int
    transport: str
    queue_ms: int
    compute_ms: int
    def __init__(self, output: _Optional[_Union[_worker_pb2.SequenceOutput, _Mapping]] = ..., transfer_bytes: _Optional[int] = ..., transport: _Optional[str] = ..., queue_ms: _Optional[int] = ..., compute_ms: _Optional[int] = ...) -> None: ...

class ProbeLinkRequest(_message.Message):
    __slots__ = ("decode_worker",)
    DECODE_WORKER_FIELD_NUMBER: _ClassVar[int]
    decode_worker: str
    def __init__(self, decode_worker: _Optional[str] = ...) -> None: ...

class ProbeLinkResponse(_message.Message):
    __slots__ = ("bytes", "elapsed_us", "transport", "refused", "carrier")
    class RefusedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    BYTES_FIELD_NUMBER: _ClassVar[int]
    ELAPSED_US_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    CARRIER_FIELD_NUMBER: _ClassVar[int]
    bytes: int
    elapsed_us: int
    transport: str
    refused: _containers.ScalarMap[str, str]
    carrier: str
    def __init__(self, bytes: _Optional[int] = ..., elapsed_us: _Optional[int] = ..., transport: _Optional[str] = ..., refused: _Optional[_Mapping[str, str]] = ..., carrier: _Optional[str] = ...) -> None: ...
