"""The catalogue of spans: each recorded span, its attributes and events. docs/tracing.md is made from it.

Tests compare the spans that processes record with the catalogue, in both directions.
"""

from __future__ import annotations

from dataclasses import dataclass, field

ROOT = "{operation} {model}"
ERROR = "error.type"
TRUNCATED = "tandem.truncated"
HINT = "tandem.sampling.hint"
TENANT = "tandem.tenant"
OF_ANY = {
    ERROR: "of a span that failed: the error's type, as clients get it; the status is ERROR then",
    TRUNCATED: "true where the phase ended before it was over: it failed, something beside it did, or the client left",
}
# Attributes of an event for one step of an engine, as of the step's end.
STEP = ("engine.running", "engine.waiting", "engine.kv_usage")


@dataclass(frozen=True, slots=True)
class CataloguedSpan:
    service: str
    name: str
    meaning: str
    attributes: dict[str, str]  # attributes besides OF_ANY; `<…>` stands for any name
    events: dict[str, tuple[str, ...]] = field(default_factory=dict)  # the attributes of each event


_WORKER = {"tandem.worker": "the worker's name"}
_REQUEST = {
    "gen_ai.request.id": "x-request-id, or one that the gateway made",
    "http.response.status_code": "HTTP's status, whichever the door; 499: the client left",
    HINT: "`failed` (a status from 500 on) or `slow` (it missed a target), for tail sampling",
}
_PARAMETERS = ("max_tokens", "temperature", "top_p", "top_k", "seed", "frequency_penalty", "presence_penalty")
_ROOT = {
    **_REQUEST,
    TENANT: "whose it is, where that is known",
    "gen_ai.operation.name": "`chat` or `text_completion`",
    "gen_ai.provider.name": "`tandem`",
    "gen_ai.request.model": "as it was asked for",
    "gen_ai.response.model": "likewise",
    "gen_ai.response.id": "as gen_ai.request.id",
    "gen_ai.request.choice.count": "prompts times n",
    "gen_ai.request.n": "answers of each prompt",
    "gen_ai.request.stop_sequences": "where there are any",
    **{f"gen_ai.request.{name}": "where the client said it" for name in _PARAMETERS},
    "gen_ai.response.finish_reasons": "of each choice; `error` where it came to none",
    "gen_ai.usage.input_tokens": "where tokens came or the answer is whole",
    "gen_ai.usage.output_tokens": "likewise",
    "gen_ai.usage.cache_read.input_tokens": "likewise: of the prompt, those that were cached",
    "gen_ai.usage.prompt_tokens": "as input_tokens, by vLLM's name",
    "gen_ai.usage.completion_tokens": "as output_tokens, by vLLM's name",
    "gen_ai.latency.time_to_first_token": "seconds from the request's arrival",
    "gen_ai.latency.time_in_queue": "seconds of its choice that waited longest",
    "tandem.path": "`remote`, `local` or `none`",
    "tandem.path.reason": "why this pair and this path",
    "tandem.migrated": "how often its choices went on elsewhere",
    "tandem.speculative.proposed_tokens": "tokens proposed ahead",
    "tandem.speculative.accepted_tokens": "those that were right",
    "kv.transfer.bytes": "of all its prefills that succeeded",
}
_TRANSFER = {
    "kv.transfer.bytes": "KV bytes that were sent",
    "kv.transfer.blocks": "blocks of the prompt",
    "kv.transfer.layers": "layers of each",
    "kv.transfer.transport": "what carried them",
    "kv.transfer.refused.<transport>": "why it was not one that the prefill worker likes better",
    "kv.transfer.carrier": "what the transport chose itself, such as NCCL's NET/Socket",
    "kv.transfer.peer": "the decode worker",
    "kv.transfer.peer_incarnation": "its incarnation",
    "kv.transfer.push_s": "seconds that the engine's own thread spent in pushes",
    "kv.transfer.exposed_s": "seconds from the commit, when nothing is left to compute, until decode may start",
    "kv.transfer.tail_s": "seconds from the last push until decode may start",
    "kv.transfer.overlap_ratio": "share of the span, 0 to 1, that ran beneath computing",
}
_DECODE = {
    **_WORKER,
    "decode.tokens": "tokens that it wrote",
    "decode.cached_tokens": "tokens of the prompt that it had cached",
    "decode.proposed_tokens": "tokens proposed ahead",
    "decode.accepted_tokens": "those that were right",
    "decode.finish_reason": "`stop`, `length` or `abort`; none where it failed",
}
_MIGRATION = {
    "tandem.migration.from": "the worker that was lost",
    "tandem.migration.reason": "what happened to it",
    "tandem.migration.written_tokens": "tokens that were there; 0: the request is tried again",
}
_QUEUE = {
    "tandem.queue.class": "its priority class",
    "tandem.queue.tenant": "whose it is",
    "tandem.queue.wait_s": "seconds that it waited",
}
_REFUSED = {
    **_REQUEST,
    "rpc.grpc.status_code": "gRPC's, whichever the door",
    "tandem.refused.after_s": "seconds since it came",
}
_PUSH = ("first_block", "blocks")

CATALOGUE = (
    CataloguedSpan("gateway", ROOT, "the request, whole", _ROOT, {"first_token": ()}),
    CataloguedSpan("gateway", "refused", "a request that failed before it was accepted, alone in its trace", _REFUSED),
    CataloguedSpan("gateway", "queue", "until it is admitted", _QUEUE),
    CataloguedSpan("gateway", "route", "until a pair is reserved", {"tandem.path.reason": "why this pair"}),
    CataloguedSpan("gateway", "reserve", "until the decode worker has its KV blocks", _WORKER),
    CataloguedSpan(
        "gateway", "prefill", "until the first token is here", {**_WORKER, "kv.transfer.bytes": "KV bytes that moved"}
    ),
    CataloguedSpan(
        "gateway", "decode", "from the reservation to the last token", {"decode.tokens": "that came by this attempt"}
    ),
    CataloguedSpan(
        "gateway", "migration", "from a loss until tokens come again; linked to the hop that was lost", _MIGRATION
    ),
    CataloguedSpan(
        "prefill", "prefill", "the prompt on the worker, its wait for a turn included",
        {
            **_WORKER,
            "prefill.tokens": "of a prompt that was prefilled to its end",
            "prefill.cached_tokens": "those of them that were cached",
            "prefill.queue_s": "seconds until its first layer was computed",
        },
        {"chunk": _PUSH},
    ),
    CataloguedSpan(
        "prefill", "kv.transfer", "from the first push until decode may start", _TRANSFER,
        {"layer": ("layer", "push_s", *_PUSH)},
    ),
    CataloguedSpan(
        "prefill", "kv.fetch", "from asking another worker for KV that it has cached until it is here",
        {name: _TRANSFER[name] for name in ("kv.transfer.blocks", "kv.transfer.bytes")}
        | {"kv.transfer.peer": "the worker that had it", "kv.transfer.peer_incarnation": "its incarnation"},
    ),
    CataloguedSpan(
        "any worker", "kv.restore", "from looking for the prompt's blocks on disk until they are in the cache",
        {"kv.restored_blocks": "blocks of the prompt"},
    ),
    CataloguedSpan(
        "decode", "decode", "the answer on the worker, from its reservation on", _DECODE,
        {"landed": ("kv.transfer.bytes",), "step": ("decode.tokens", *STEP)},
    ),
)  # fmt: skip
