from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class DrainRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("drained",)
    DRAINED_FIELD_NUMBER: _ClassVar[int]
    drained: bool
    def __init__(self, drained: _Optional[bool] = ...) -> None: ...

class CheckIntegrityRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CheckIntegrityResponse(_message.Message):
    __slots__ = ("violations", "num_sequences", "num_blocks", "held")
    class HeldEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    VIOLATIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    violations: _containers.RepeatedScalarFieldContainer[str]
    num_sequences: int
    num_blocks: int
    held: _containers.ScalarMap[str, int]
    def __init__(self, violations: _Optional[_Iterable[str]] = ..., num_sequences: _Optional[int] = ..., num_blocks: _Optional[int] = ..., held: _Optional[_Mapping[str, int]] = ...) -> None: ...

class RecentSpansRequest(_message.Message):
    __slots__ = ("trace_id",)
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    trace_id: bytes
    def __init__(self, trace_id: _Optional[bytes] = ...) -> None: ...

class RecentSpansResponse(_message.Message):
    __slots__ = ("traces",)
    TRACES_FIELD_NUMBER: _ClassVar[int]
    traces: bytes
    def __init__(self, traces: _Optional[bytes] = ...) -> None: ...

class ProfileRequest(_message.Message):
    __slots__ = ("seconds",)
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    seconds: float
    def __init__(self, seconds: _Optional[float] = ...) -> None: ...

class ProfileResponse(_message.Message):
    __slots__ = ("speedscope",)
    SPEEDSCOPE_FIELD_NUMBER: _ClassVar[int]
    speedscope: bytes
    def __init__(self, speedscope: _Optional[bytes] = ...) -> None: ...

class OverrideRequest(_message.Message):
    __slots__ = ("settings", "ttl_s", "by")
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    BY_FIELD_NUMBER: _ClassVar[int]
    settings: str
    ttl_s: float
    by: str
    def __init__(self, settings: _Optional[str] = ..., ttl_s: _Optional[float] = ..., by: _Optional[str] = ...) -> None: ...

class OverrideResponse(_message.Message):
    __slots__ = ("in_force",)
    IN_FORCE_FIELD_NUMBER: _ClassVar[int]
    in_force: str
    def __init__(self, in_force: _Optional[str] = ...) -> None: ...
