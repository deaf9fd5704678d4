"""Conversion between protos and the engine's own types."""

from __future__ import annotations

from dataclasses import replace

from tandem.adapters import AdapterRef
from tandem.block_hash import MAX_SALT_LENGTH
from tandem.engine import FinishReason, Request, SampledToken, SequenceOutput
from tandem.sampling import SamplingParams
from tandem.security import ClusterSecret
from tandem.speculative import Speculative
from tandem.v1 import llm_pb2, worker_pb2
from tandem.worker.errors import SequenceFailed

FINISH_REASONS = {
    None: llm_pb2.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: llm_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: llm_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORT: llm_pb2.FINISH_REASON_ABORT,
}


def request_of(spec: worker_pb2.SequenceSpec) -> Request:
    """Returns the engine's request. Raises SequenceFailed."""
    if len(spec.cache_salt) > MAX_SALT_LENGTH:
        said = f"cache_salt: must have at most {MAX_SALT_LENGTH} characters, got {len(spec.cache_salt)}"
        raise SequenceFailed("INVALID_ARGUMENT", said)
    return Request(
        request_id=spec.request_id,
        token_ids=list(spec.token_ids),
        sampling=SamplingParams.from_proto(spec.sampling),
        priority=spec.priority,
        cache_salt=spec.cache_salt,
        tenant=spec.tenant,
        speculative=Speculative.from_proto(spec.speculative) if spec.HasField("speculative") else None,
        num_prior_tokens=spec.num_prior_tokens,
        lora=adapter_of(spec.adapter) if spec.HasField("adapter") else None,
        itl_target_s=spec.itl_target_ms / 1000,
        choice_id=spec.choice_id,
        alone_until=spec.alone_until,
        begins_apart=spec.begins_apart,
        dimensions=spec.embedding.dimensions if spec.HasField("embedding") else None,
    )


def adapter_of(proto: worker_pb2.Adapter) -> AdapterRef:
    return AdapterRef(proto.name, proto.path, proto.revision)


def adapter_to_proto(ref: AdapterRef) -> worker_pb2.Adapter:
    return worker_pb2.Adapter(name=ref.name, path=ref.path, revision=ref.revision)


def token_of(output: worker_pb2.SequenceOutput) -> SampledToken:
    """Returns the single token of a prefill's output."""
    if not output.logprobs:
        return SampledToken(output.token_ids[0])
    top = tuple((t.token_id, t.logprob) for t in output.logprobs[0].top)
    return SampledToken(output.token_ids[0], output.logprobs[0].logprob, top, output.logprobs[0].rank)


def first_token(output: SequenceOutput) -> bytes:
    """Returns the payload of a transfer: a prefill's output, without the fields that only its gateway needs."""
    return output_to_proto(replace(output, prompt_logprobs=[])).SerializeToString()


def output_to_proto(output: SequenceOutput) -> worker_pb2.SequenceOutput:
    proto = worker_pb2.SequenceOutput(
        request_id=output.request_id,
        first_index=output.first_index,
        token_ids=[token.token_id for token in output.tokens],
        finish_reason=FINISH_REASONS[output.finish_reason],
        num_cached_tokens=output.num_cached_tokens,
        logprobs=[_logprobs(token) for token in output.tokens if token.logprob is not None],
        num_proposed_tokens=output.num_proposed_tokens,
        num_accepted_tokens=output.num_accepted_tokens,
        prompt_logprobs=map(_logprobs, output.prompt_logprobs),
        batch_size=output.batch_size,
        kv_usage=output.kv_usage,
        embedding=output.embedding,
    )
    if output.error:
        proto.failure.CopyFrom(worker_pb2.Failure(code="INTERNAL", message=output.error))
    return proto


def failed(request_id: str, code: str, message: str) -> worker_pb2.SequenceOutput:
    """Returns the last output of a sequence that ended in an error."""
    return worker_pb2.SequenceOutput(request_id=request_id, failure=worker_pb2.Failure(code=code, message=message))


def _logprobs(token: SampledToken) -> llm_pb2.TokenLogprobs:
    top = [llm_pb2.TopLogprob(token_id=i, logprob=p) for i, p in token.top]
    return llm_pb2.TokenLogprobs(token_id=token.token_id, logprob=token.logprob, top=top, rank=token.rank)


def sign(ticket: worker_pb2.LandingTicket, secret: ClusterSecret) -> None:
    ticket.proof = secret.proof("ticket", _said(ticket))


def is_signed(ticket: worker_pb2.LandingTicket, secret: ClusterSecret) -> bool:
    """True if the ticket's signature is valid, or the cluster has no secret."""
    return secret.proves(ticket.proof, "ticket", _said(ticket))


def _said(ticket: worker_pb2.LandingTicket) -> bytes:
    unsigned = worker_pb2.LandingTicket()
    unsigned.CopyFrom(ticket)
    unsigned.proof = ""
    return unsigned.SerializeToString(deterministic=True)
