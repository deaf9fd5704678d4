from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

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

class ListLinksRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListLinksResponse(_message.Message):
    __slots__ = ("links",)
    LINKS_FIELD_NUMBER: _ClassVar[int]
    links: _containers.RepeatedCompositeFieldContainer[KVLink]
    def __init__(self, links: _Optional[_Iterable[_Union[KVLink, _Mapping]]] = ...) -> None: ...

class KVLink(_message.Message):
    __slots__ = ("decode_worker", "decode_incarnation", "healthy", "transport", "carrier", "refused", "bytes", "transfers", "busy_s", "failures")
    DECODE_WORKER_FIELD_NUMBER: _ClassVar[int]
    DECODE_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    HEALTHY_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    CARRIER_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    BUSY_S_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    decode_worker: str
    decode_incarnation: str
    healthy: bool
    transport: str
    carrier: str
    refused: str
    bytes: int
    transfers: int
    busy_s: float
    failures: int
    def __init__(self, decode_worker: _Optional[str] = ..., decode_incarnation: _Optional[str] = ..., healthy: _Optional[bool] = ..., transport: _Optional[str] = ..., carrier: _Optional[str] = ..., refused: _Optional[str] = ..., bytes: _Optional[int] = ..., transfers: _Optional[int] = ..., busy_s: _Optional[float] = ..., failures: _Optional[int] = ...) -> None: ...
