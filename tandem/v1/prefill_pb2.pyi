from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

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
