"""One request, whichever door it came through.

    OpenAI body | GenerateRequest  ->  Sampling (what the client said)
    Sampling + model's defaults    ->  checked against ranges, every default resolved
    prompts x n                    ->  one SequenceSpec per choice, sent to workers

Ranges live here and nowhere else; the two doors only read fields.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from opentelemetry.context import Context

from services.gateway.errors import InvalidRequest
from services.gateway.model import ServedModel
from tandem.v1 import llm_pb2, worker_pb2

MAX_LOGPROBS = 20
MAX_STOPS = 16
MAX_STOP_LENGTH = 1024
# The numbers that a client may set, by the name that both doors and Sampling have for them: lowest and highest value.
RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "top_k": (-1, 2**31 - 1),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 10.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "max_tokens": (1, 2**31 - 1),
    "min_tokens": (0, 2**31 - 1),
    "logprobs": (0, MAX_LOGPROBS),
    "seed": (-(2**63), 2**64 - 1),
}
RESOLVED = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the client wants tokens chosen; None where it did not say."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    seed: int | None = None
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class Generation:
    """A checked request. Every prompt gets `n` answers; choice i is of prompt i // n."""

    operation: str  # "chat" or "text_completion", as GenAI telemetry names it
    request_id: str
    model: ServedModel
    prompts: Sequence[Sequence[int]]
    n: int
    sampling: Sampling
    deadline: float  # on the event loop's clock
    priority: int = 0
    tenant: str = ""
    cache_salt: str = ""
    streamed: bool = False
    parent: Context | None = None

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.n

    def sequence(self, choice: int, max_model_len: int, seed: int) -> worker_pb2.SequenceSpec:
        """What workers get for one choice; its request_id is set for each attempt."""
        prompt = self.prompts[choice // self.n]
        return worker_pb2.SequenceSpec(
            token_ids=prompt,
            sampling=_resolve(self.sampling, self.model, max_model_len - len(prompt), seed + choice % self.n),
            priority=self.priority,
            cache_salt=self.cache_salt,
            tenant=self.tenant,
        )


def check_sampling(sampling: Sampling, vocab_size: int, names: Mapping[str, str] | None = None) -> None:
    """
    Args:
        names: the client's names of fields, where they differ from ours.

    Raises:
        InvalidRequest: naming the first field out of its range.
    """
    names = names or {}
    for name, (low, high) in RANGES.items():
        value = getattr(sampling, name)
        if value is not None and not low <= value <= high:
            said = names.get(name, name)
            raise InvalidRequest(f"{said} must be between {low} and {high}, got {value}", said)
    if sampling.top_p == 0:
        raise InvalidRequest("top_p must be above 0", "top_p")
    if sampling.max_tokens is not None and (sampling.min_tokens or 0) > sampling.max_tokens:
        raise InvalidRequest(
            f"min_tokens must not be above max_tokens, got {sampling.min_tokens} and {sampling.max_tokens}",
            "min_tokens",
        )
    _check_stops(sampling.stop)
    check_token_ids(sampling.stop_token_ids, vocab_size, "stop_token_ids")
    check_token_ids(list(sampling.logit_bias), vocab_size, "logit_bias")
    for token, bias in sampling.logit_bias.items():
        if not -100 <= bias <= 100:
            raise InvalidRequest(f"logit_bias must be between -100 and 100, got {bias} for token {token}", "logit_bias")


def check_token_ids(ids: Sequence[int], vocab_size: int, param: str) -> None:
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        bad = next(i for i in ids if not 0 <= i < vocab_size)
        raise InvalidRequest(f"{param}: token id {bad} is not in the vocabulary of {vocab_size}", param)


def check_length(prompt: Sequence[int], max_tokens: int | None, max_model_len: int, param: str) -> None:
    """
    Raises:
        InvalidRequest: the prompt is empty, or it and the answer do not fit the model's context.
    """
    if not prompt:
        raise InvalidRequest(f"{param} must not be empty", param)
    wanted = len(prompt) + (max_tokens or 1)
    if wanted > max_model_len:
        answer = f"{max_tokens} tokens of answer" if max_tokens else "at least 1 token of answer"
        raise InvalidRequest(
            f"this model's maximum context length is {max_model_len} tokens, but the request needs {wanted}: "
            f"{len(prompt)} of {param} and {answer}", param, "context_length_exceeded",
        )  # fmt: skip


def with_defaults(sampling: Sampling, model: ServedModel) -> Sampling:
    """The model's generation_config where the client said nothing."""
    unset = {name: value for name, value in model.defaults.items() if getattr(sampling, name) is None}
    return replace(sampling, **unset)  # type: ignore[arg-type]


def _check_stops(stops: Sequence[str]) -> None:
    if len(stops) > MAX_STOPS:
        raise InvalidRequest(f"stop: at most {MAX_STOPS} strings, got {len(stops)}", "stop")
    for stop in stops:
        if not 0 < len(stop) <= MAX_STOP_LENGTH:
            raise InvalidRequest(f"stop: strings must have 1 to {MAX_STOP_LENGTH} characters, got {len(stop)}", "stop")


def _resolve(sampling: Sampling, model: ServedModel, room: int, seed: int) -> llm_pb2.SamplingParams:
    said = {name: getattr(sampling, name) for name in RESOLVED}
    chosen = {name: RESOLVED[name] if value is None else value for name, value in said.items()}
    chosen["top_k"] = max(int(chosen["top_k"]), 0)
    ends = () if sampling.ignore_eos else model.eos_token_ids
    return llm_pb2.SamplingParams(
        **chosen,  # type: ignore[arg-type]
        presence_penalty=sampling.presence_penalty or 0.0,
        frequency_penalty=sampling.frequency_penalty or 0.0,
        logit_bias=sampling.logit_bias,
        max_tokens=sampling.max_tokens or room,
        min_tokens=sampling.min_tokens or 0,
        stop_token_ids=sorted({*sampling.stop_token_ids, *ends}),
        logprobs=sampling.logprobs,
        seed=seed % 2**64,
        ignore_eos=sampling.ignore_eos,
    )
