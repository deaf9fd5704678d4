from tandem.v1 import llm_pb2 as _llm_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Pulse(_message.Message):
    __slots__ = ("starvation",)
    STARVATION_FIELD_NUMBER: _ClassVar[int]
    starvation: float
    def __init__(self, starvation: _Optional[float] = ...) -> None: ...

class WorkRequest(_message.Message):
    __slots__ = ("reservations", "prefills", "aborts", "num_passed_on", "pulse")
    RESERVATIONS_FIELD_NUMBER: _ClassVar[int]
    PREFILLS_FIELD_NUMBER: _ClassVar[int]
    ABORTS_FIELD_NUMBER: _ClassVar[int]
    NUM_PASSED_ON_FIELD_NUMBER: _ClassVar[int]
    PULSE_FIELD_NUMBER: _ClassVar[int]
    reservations: _containers.RepeatedCompositeFieldContainer[Reservation]
    prefills: _containers.RepeatedCompositeFieldContainer[Prefill]
    aborts: _containers.RepeatedScalarFieldContainer[str]
    num_passed_on: int
    pulse: Pulse
    def __init__(self, reservations: _Optional[_Iterable[_Union[Reservation, _Mapping]]] = ..., prefills: _Optional[_Iterable[_Union[Prefill, _Mapping]]] = ..., aborts: _Optional[_Iterable[str]] = ..., num_passed_on: _Optional[int] = ..., pulse: _Optional[_Union[Pulse, _Mapping]] = ...) -> None: ...

class WorkResponse(_message.Message):
    __slots__ = ("incarnation", "reserved", "prefilled", "outputs", "released", "num_sent", "pulse")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    RESERVED_FIELD_NUMBER: _ClassVar[int]
    PREFILLED_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    NUM_SENT_FIELD_NUMBER: _ClassVar[int]
    PULSE_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    reserved: _containers.RepeatedCompositeFieldContainer[Reserved]
    prefilled: _containers.RepeatedCompositeFieldContainer[Prefilled]
    outputs: _containers.RepeatedCompositeFieldContainer[SequenceOutput]
    released: _containers.RepeatedScalarFieldContainer[str]
    num_sent: int
    pulse: Pulse
    def __init__(self, incarnation: _Optional[str] = ..., reserved: _Optional[_Iterable[_Union[Reserved, _Mapping]]] = ..., prefilled: _Optional[_Iterable[_Union[Prefilled, _Mapping]]] = ..., outputs: _Optional[_Iterable[_Union[SequenceOutput, _Mapping]]] = ..., released: _Optional[_Iterable[str]] = ..., num_sent: _Optional[int] = ..., pulse: _Optional[_Union[Pulse, _Mapping]] = ...) -> None: ...

class Reservation(_message.Message):
    __slots__ = ("sequence", "local_prefill", "prefill_incarnation", "holder")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    LOCAL_PREFILL_FIELD_NUMBER: _ClassVar[int]
    PREFILL_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    sequence: SequenceSpec
    local_prefill: bool
    prefill_incarnation: str
    holder: CacheHolder
    def __init__(self, sequence: _Optional[_Union[SequenceSpec, _Mapping]] = ..., local_prefill: _Optional[bool] = ..., prefill_incarnation: _Optional[str] = ..., holder: _Optional[_Union[CacheHolder, _Mapping]] = ...) -> None: ...

class Reserved(_message.Message):
    __slots__ = ("request_id", "ticket", "fetched_tokens")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    FETCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    ticket: LandingTicket
    fetched_tokens: int
    def __init__(self, request_id: _Optional[str] = ..., ticket: _Optional[_Union[LandingTicket, _Mapping]] = ..., fetched_tokens: _Optional[int] = ...) -> None: ...

class Prefill(_message.Message):
    __slots__ = ("sequence", "ticket", "holder")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    sequence: SequenceSpec
    ticket: LandingTicket
    holder: CacheHolder
    def __init__(self, sequence: _Optional[_Union[SequenceSpec, _Mapping]] = ..., ticket: _Optional[_Union[LandingTicket, _Mapping]] = ..., holder: _Optional[_Union[CacheHolder, _Mapping]] = ...) -> None: ...

class CacheHolder(_message.Message):
    __slots__ = ("worker", "incarnation", "transfer_address")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    worker: str
    incarnation: str
    transfer_address: str
    def __init__(self, worker: _Optional[str] = ..., incarnation: _Optional[str] = ..., transfer_address: _Optional[str] = ...) -> None: ...

class Prefilled(_message.Message):
    __slots__ = ("output", "transfer_bytes", "transport", "refused_transports", "fetched_tokens")
    class RefusedTransportsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_BYTES_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    REFUSED_TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    FETCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    output: SequenceOutput
    transfer_bytes: int
    transport: str
    refused_transports: _containers.ScalarMap[str, str]
    fetched_tokens: int
    def __init__(self, output: _Optional[_Union[SequenceOutput, _Mapping]] = ..., transfer_bytes: _Optional[int] = ..., transport: _Optional[str] = ..., refused_transports: _Optional[_Mapping[str, str]] = ..., fetched_tokens: _Optional[int] = ...) -> None: ...

class SequenceSpec(_message.Message):
    __slots__ = ("request_id", "token_ids", "sampling", "priority", "cache_salt", "timeout_ms", "tenant", "speculative", "num_prior_tokens", "adapter", "trace_context", "itl_target_ms", "choice_id", "alone_until", "embedding", "begins_apart")
    class TraceContextEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SPECULATIVE_FIELD_NUMBER: _ClassVar[int]
    NUM_PRIOR_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    TRACE_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    ITL_TARGET_MS_FIELD_NUMBER: _ClassVar[int]
    CHOICE_ID_FIELD_NUMBER: _ClassVar[int]
    ALONE_UNTIL_FIELD_NUMBER: _ClassVar[int]
    EMBEDDING_FIELD_NUMBER: _ClassVar[int]
    BEGINS_APART_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: _llm_pb2.SamplingParams
    priority: int
    cache_salt: str
    timeout_ms: int
    tenant: str
    speculative: _llm_pb2.Speculative
    num_prior_tokens: int
    adapter: Adapter
    trace_context: _containers.ScalarMap[str, str]
    itl_target_ms: int
    choice_id: str
    alone_until: int
    embedding: Embedding
    begins_apart: bool
    def __init__(self, request_id: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_llm_pb2.SamplingParams, _Mapping]] = ..., priority: _Optional[int] = ..., cache_salt: _Optional[str] = ..., timeout_ms: _Optional[int] = ..., tenant: _Optional[str] = ..., speculative: _Optional[_Union[_llm_pb2.Speculative, _Mapping]] = ..., num_prior_tokens: _Optional[int] = ..., adapter: _Optional[_Union[Adapter, _Mapping]] = ..., trace_context: _Optional[_Mapping[str, str]] = ..., itl_target_ms: _Optional[int] = ..., choice_id: _Optional[str] = ..., alone_until: _Optional[int] = ..., embedding: _Optional[_Union[Embedding, _Mapping]] = ..., begins_apart: _Optional[bool] = ...) -> None: ...

class Embedding(_message.Message):
    __slots__ = ("dimensions",)
    DIMENSIONS_FIELD_NUMBER: _ClassVar[int]
    dimensions: int
    def __init__(self, dimensions: _Optional[int] = ...) -> None: ...

class Adapter(_message.Message):
    __slots__ = ("name", "path", "revision")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    name: str
    path: str
    revision: str
    def __init__(self, name: _Optional[str] = ..., path: _Optional[str] = ..., revision: _Optional[str] = ...) -> None: ...

class ReadAdapterRequest(_message.Message):
    __slots__ = ("name", "path")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    name: str
    path: str
    def __init__(self, name: _Optional[str] = ..., path: _Optional[str] = ...) -> None: ...

class ReadAdapterResponse(_message.Message):
    __slots__ = ("adapter",)
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    adapter: Adapter
    def __init__(self, adapter: _Optional[_Union[Adapter, _Mapping]] = ...) -> None: ...

class DropAdapterRequest(_message.Message):
    __slots__ = ("revision",)
    REVISION_FIELD_NUMBER: _ClassVar[int]
    revision: str
    def __init__(self, revision: _Optional[str] = ...) -> None: ...

class DropAdapterResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LandingTicket(_message.Message):
    __slots__ = ("transfer_id", "decode_worker", "decode_incarnation", "transfer_address", "kv_layout_hash", "num_cached_blocks", "num_prompt_blocks", "proof")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    DECODE_WORKER_FIELD_NUMBER: _ClassVar[int]
    DECODE_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    KV_LAYOUT_HASH_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    transfer_id: str
    decode_worker: str
    decode_incarnation: str
    transfer_address: str
    kv_layout_hash: str
    num_cached_blocks: int
    num_prompt_blocks: int
    proof: str
    def __init__(self, transfer_id: _Optional[str] = ..., decode_worker: _Optional[str] = ..., decode_incarnation: _Optional[str] = ..., transfer_address: _Optional[str] = ..., kv_layout_hash: _Optional[str] = ..., num_cached_blocks: _Optional[int] = ..., num_prompt_blocks: _Optional[int] = ..., proof: _Optional[str] = ...) -> None: ...

class SequenceOutput(_message.Message):
    __slots__ = ("request_id", "first_index", "token_ids", "finish_reason", "num_cached_tokens", "failure", "logprobs", "num_proposed_tokens", "num_accepted_tokens", "prompt_logprobs", "batch_size", "kv_usage", "embedding")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROPOSED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    KV_USAGE_FIELD_NUMBER: _ClassVar[int]
    EMBEDDING_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    first_index: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    finish_reason: _llm_pb2.FinishReason
    num_cached_tokens: int
    failure: Failure
    logprobs: _containers.RepeatedCompositeFieldContainer[_llm_pb2.TokenLogprobs]
    num_proposed_tokens: int
    num_accepted_tokens: int
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[_llm_pb2.TokenLogprobs]
    batch_size: int
    kv_usage: float
    embedding: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, request_id: _Optional[str] = ..., first_index: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., finish_reason: _Optional[_Union[_llm_pb2.FinishReason, str]] = ..., num_cached_tokens: _Optional[int] = ..., failure: _Optional[_Union[Failure, _Mapping]] = ..., logprobs: _Optional[_Iterable[_Union[_llm_pb2.TokenLogprobs, _Mapping]]] = ..., num_proposed_tokens: _Optional[int] = ..., num_accepted_tokens: _Optional[int] = ..., prompt_logprobs: _Optional[_Iterable[_Union[_llm_pb2.TokenLogprobs, _Mapping]]] = ..., batch_size: _Optional[int] = ..., kv_usage: _Optional[float] = ..., embedding: _Optional[_Iterable[float]] = ...) -> None: ...

class Failure(_message.Message):
    __slots__ = ("code", "message")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    code: str
    message: str
    def __init__(self, code: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class ReadModelFilesRequest(_message.Message):
    __slots__ = ("fingerprint",)
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    fingerprint: str
    def __init__(self, fingerprint: _Optional[str] = ...) -> None: ...

class ReadModelFilesResponse(_message.Message):
    __slots__ = ("name", "data")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    name: str
    data: bytes
    def __init__(self, name: _Optional[str] = ..., data: _Optional[bytes] = ...) -> None: ...

class ListCacheRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListCacheResponse(_message.Message):
    __slots__ = ("tiers",)
    TIERS_FIELD_NUMBER: _ClassVar[int]
    tiers: _containers.RepeatedCompositeFieldContainer[CacheTier]
    def __init__(self, tiers: _Optional[_Iterable[_Union[CacheTier, _Mapping]]] = ...) -> None: ...

class CacheTier(_message.Message):
    __slots__ = ("name", "block_bytes", "max_blocks", "tenants")
    NAME_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    name: str
    block_bytes: int
    max_blocks: int
    tenants: _containers.RepeatedCompositeFieldContainer[TenantBlocks]
    def __init__(self, name: _Optional[str] = ..., block_bytes: _Optional[int] = ..., max_blocks: _Optional[int] = ..., tenants: _Optional[_Iterable[_Union[TenantBlocks, _Mapping]]] = ...) -> None: ...

class TenantBlocks(_message.Message):
    __slots__ = ("tenant", "owner", "num_blocks")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    owner: bytes
    num_blocks: int
    def __init__(self, tenant: _Optional[str] = ..., owner: _Optional[bytes] = ..., num_blocks: _Optional[int] = ...) -> None: ...

class DropCacheRequest(_message.Message):
    __slots__ = ("tenant",)
    TENANT_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    def __init__(self, tenant: _Optional[str] = ...) -> None: ...

class DropCacheResponse(_message.Message):
    __slots__ = ("num_blocks",)
    class NumBlocksEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    num_blocks: _containers.ScalarMap[str, int]
    def __init__(self, num_blocks: _Optional[_Mapping[str, int]] = ...) -> None: ...

class PinCacheRequest(_message.Message):
    __slots__ = ("tenant", "seconds")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    seconds: float
    def __init__(self, tenant: _Optional[str] = ..., seconds: _Optional[float] = ...) -> None: ...

class PinCacheResponse(_message.Message):
    __slots__ = ("tiers",)
    TIERS_FIELD_NUMBER: _ClassVar[int]
    tiers: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, tiers: _Optional[_Iterable[str]] = ...) -> None: ...
