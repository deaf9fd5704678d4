from tandem.v1 import worker_pb2 as _worker_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ReserveRequest(_message.Message):
    __slots__ = ("sequence", "stream_id", "decode_incarnation", "local_prefill", "prefill_incarnation")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    STREAM_ID_FIELD_NUMBER: _ClassVar[int]
    DECODE_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    LOCAL_PREFILL_FIELD_NUMBER: _ClassVar[int]
    PREFILL_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    sequence: _worker_pb2.SequenceSpec
    stream_id: str
    decode_incarnation: str
    local_prefill: bool
    prefill_incarnation: str
    def __init__(self, sequence: _Optional[_Union[_worker_pb2.SequenceSpec, _Mapping]] = ..., stream_id: _Optional[str] = ..., decode_incarnation: _Optional[str] = ..., local_prefill: _Optional[bool] = ..., prefill_incarnation: _Optional[str] = ...) -> None: ...

class ReserveResponse(_message.Message):
    __slots__ = ("ticket",)
    TICKET_FIELD_NUMBER: _ClassVar[int]
    ticket: _worker_pb2.LandingTicket
    def __init__(self, ticket: _Optional[_Union[_worker_pb2.LandingTicket, _Mapping]] = ...) -> None: ...

class StreamTokensRequest(_message.Message):
    __slots__ = ("stream_id",)
    STREAM_ID_FIELD_NUMBER: _ClassVar[int]
    stream_id: str
    def __init__(self, stream_id: _Optional[str] = ...) -> None: ...

class StreamTokensResponse(_message.Message):
    __slots__ = ("incarnation", "outputs")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    outputs: _containers.RepeatedCompositeFieldContainer[_worker_pb2.SequenceOutput]
    def __init__(self, incarnation: _Optional[str] = ..., outputs: _Optional[_Iterable[_Union[_worker_pb2.SequenceOutput, _Mapping]]] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("request_ids",)
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    request_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, request_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class AbortResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
