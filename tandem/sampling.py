"""The sampling parameters, which choose an answer's tokens: type, range and default of each.

    HTTP body | llm.proto  ->  what the client gave  ->  SamplingParams  ->  llm.proto  ->  worker  ->  sampler
                               model's generation_config for what it did not give

Names are those of llm.proto and of the HTTP bodies. A new parameter is a field there, a field here, and what the
sampler does with it.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Collection, Mapping
from ctypes import c_float
from dataclasses import dataclass, field
from typing import Any, Self, get_type_hints

MAX_LOGPROBS = 20  # the most that clients may ask for
MAX_LOGPROB_TOKEN_IDS = 128
MAX_STOPS = 16
MAX_BAD_WORDS = 64
MAX_STOP_LENGTH = 1024
MAX_BIAS, MAX_BIASED = 100.0, 16384


class InvalidParameter(ValueError):
    """A parameter that cannot be served; `problem` says what a right value would be."""

    def __init__(self, name: str, problem: str) -> None:
        super().__init__(f"{name} {problem}")
        self.name = name
        self.problem = problem


def _number(default: float | None, low: float, high: float, of_model: bool = False) -> Any:
    """Returns a numeric field. `of_model`: the model's generation_config may set another default."""
    return field(default=default, metadata={"range": (low, high), "of_model": of_model})


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters with all defaults resolved.

    `temperature` 0 is greedy, and so is `top_p` 0, for which `of` makes the temperature 0;
    `top_k` 0, `logprobs` and `prompt_logprobs` None are off.

    `logprobs` n reports the chosen token and the n most likely tokens, or `logprob_token_ids` instead of the likely
    ones, from the model's unmodified distribution; `prompt_logprobs` n does so for the prompt's tokens after the first.
    `max_tokens` 0 only prefills the prompt, and is never sent to workers. The draw for token t depends only on (`seed`,
    t). Workers get no text, so their `stop` and `bad_words` are empty: `stop_token_ids` has the model's end-of-text ids
    unless `ignore_eos`, and `bad_words_token_ids` the spellings of `bad_words`, whose last token is not chosen after
    the others. `grammar` (tandem/grammar) has precedence: if the other rules leave no token that it allows, it alone
    decides. After `thinking_token_budget` tokens of thoughts `thinking_end_token_ids` are forced; thoughts begin with
    the answer, or after `thinking_begin_token_ids`.
    """

    max_tokens: int = _number(2**31 - 1, 0, 2**31 - 1)  # the model's context also bounds an answer
    min_tokens: int = _number(0, 0, 2**31 - 1)
    temperature: float = _number(1.0, 0.0, 2.0, of_model=True)
    top_k: int = _number(0, 0, 2**31 - 1, of_model=True)
    top_p: float = _number(1.0, 0.0, 1.0, of_model=True)
    min_p: float = _number(0.0, 0.0, 1.0, of_model=True)
    repetition_penalty: float = _number(1.0, 0.01, 10.0, of_model=True)
    presence_penalty: float = _number(0.0, -2.0, 2.0)
    frequency_penalty: float = _number(0.0, -2.0, 2.0)
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    stop: tuple[str, ...] = field(default_factory=tuple)
    stop_token_ids: frozenset[int] = field(default_factory=frozenset)
    logprobs: int | None = _number(None, 0, 2**31 - 1)
    seed: int = _number(0, -(2**63), 2**64 - 1)
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    allowed_token_ids: frozenset[int] = field(default_factory=frozenset)
    bad_words: tuple[str, ...] = field(default_factory=tuple)
    bad_words_token_ids: tuple[tuple[int, ...], ...] = field(default_factory=tuple)
    grammar: str = ""
    prompt_logprobs: int | None = _number(None, 0, 2**31 - 1)
    logprob_token_ids: tuple[int, ...] = field(default_factory=tuple)
    thinking_token_budget: int | None = _number(None, 0, 2**31 - 1)
    thinking_begin_token_ids: tuple[int, ...] = field(default_factory=tuple)
    thinking_end_token_ids: tuple[int, ...] = field(default_factory=tuple)

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        """Makes parameters of what a client gave, by name, and checks them. -1 means `top_k` 0, and no
        `thinking_token_budget`. Raises InvalidParameter.
        """
        made = cls(**given)
        if made.top_k == -1:
            made = dataclasses.replace(made, top_k=0)
        if made.thinking_token_budget == -1:
            made = dataclasses.replace(made, thinking_token_budget=None)
        if made.logprob_token_ids and made.logprobs is None:
            made = dataclasses.replace(made, logprobs=0)
        for name in ("logprobs", "prompt_logprobs"):
            if not 0 <= (count := getattr(made, name) or 0) <= MAX_LOGPROBS:
                raise InvalidParameter(name, f"must be between 0 and {MAX_LOGPROBS}, got {count}")
        made.check(given)
        if _as_sent(made.top_p) == 0:
            made = dataclasses.replace(made, temperature=0.0)
        if made.max_tokens == 0 and made.prompt_logprobs is None:
            raise InvalidParameter("max_tokens", "must be at least 1 where nothing of the prompt is asked for, got 0")
        if len(made.logprob_token_ids) > MAX_LOGPROB_TOKEN_IDS:
            count = len(made.logprob_token_ids)
            raise InvalidParameter("logprob_token_ids", f"must have at most {MAX_LOGPROB_TOKEN_IDS} ids, got {count}")
        return made if made.seed >= 0 else dataclasses.replace(made, seed=made.seed % 2**64)

    @classmethod
    def from_proto(cls, message: Any) -> Self:
        """Reads a tandem.v1.SamplingParams, unchecked."""
        return cls(**given_in(message))

    def to_proto(self, message: Any) -> None:
        """Writes to an empty tandem.v1.SamplingParams, in which parameters with default values stay unset."""
        for name, value, default in zip(NAMES, VALUES(self), DEFAULTS.values(), strict=True):
            if value is default or value == default:
                continue
            if name not in CONTAINERS:
                setattr(message, name, value)
            elif name == "logit_bias":
                message.logit_bias.update(value)
            elif name == "bad_words_token_ids":
                for ids in value:
                    message.bad_words_token_ids.add(ids=ids)
            else:
                getattr(message, name).extend(sorted(value) if isinstance(value, frozenset) else value)

    def check(self, given: Collection[str] | None = None) -> None:
        """Checks types and ranges.

        Args:
            given: names of the parameters that may differ from their defaults; None: all.

        Raises:
            InvalidParameter: the first parameter that no model can serve.
        """
        for name in RANGES if given is None else filter(RANGES.__contains__, given):
            (low, high), value = RANGES[name], getattr(self, name)
            if value is not None and not LEAST[name] <= value <= high:
                raise InvalidParameter(name, f"must be between {low} and {high}, got {value}")
        if given is None and self.temperature > 0 and _as_sent(self.top_p) == 0:
            raise InvalidParameter("top_p", f"must be above 0 where temperature is, got {self.top_p}")
        if self.min_tokens > self.max_tokens:
            raise InvalidParameter(
                "min_tokens", f"must not be above max_tokens, got {self.min_tokens} and {self.max_tokens}"
            )
        if len(self.stop) > MAX_STOPS:
            raise InvalidParameter("stop", f"must have at most {MAX_STOPS} strings, got {len(self.stop)}")
        for text in self.stop:
            if not 0 < len(text) <= MAX_STOP_LENGTH:
                raise InvalidParameter("stop", f"strings must have 1 to {MAX_STOP_LENGTH} characters, got {len(text)}")
        if len(self.bad_words) > MAX_BAD_WORDS:
            raise InvalidParameter("bad_words", f"must have at most {MAX_BAD_WORDS} texts, got {len(self.bad_words)}")
        for text in self.bad_words:
            if not 0 < len(text) <= MAX_STOP_LENGTH:
                raise InvalidParameter("bad_words", f"must have 1 to {MAX_STOP_LENGTH} characters, got {len(text)}")
        if len(self.logit_bias) > MAX_BIASED:
            raise InvalidParameter("logit_bias", f"must have at most {MAX_BIASED} tokens, got {len(self.logit_bias)}")
        for token, bias in self.logit_bias.items():
            if not -MAX_BIAS <= bias <= MAX_BIAS:
                raise InvalidParameter(
                    "logit_bias", f"must be between -{MAX_BIAS} and {MAX_BIAS}, got {bias} for token {token}"
                )

    def check_vocabulary(self, vocab_size: int) -> None:
        """Checks token ids against a model's vocabulary.

        Raises:
            InvalidParameter: a model of `vocab_size` tokens cannot serve a parameter.
        """
        check_token_ids("logit_bias", self.logit_bias, vocab_size)
        check_token_ids("allowed_token_ids", self.allowed_token_ids, vocab_size)
        for ids in self.bad_words_token_ids:
            check_token_ids("bad_words_token_ids", ids, vocab_size)
        for name in ("logprob_token_ids", "thinking_begin_token_ids", "thinking_end_token_ids"):
            check_token_ids(name, getattr(self, name), vocab_size)
        for name in ("logprobs", "prompt_logprobs"):
            if (getattr(self, name) or 0) > vocab_size:
                raise InvalidParameter(name, f"must be at most {vocab_size}, the size of the vocabulary")


def check_token_ids(name: str, ids: Collection[int], vocab_size: int) -> None:
    """Checks token ids of one parameter.

    Raises:
        InvalidParameter: names the first id that is not among `vocab_size` tokens.
    """
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        wrong = next(i for i in ids if not 0 <= i < vocab_size)
        raise InvalidParameter(name, f"has token id {wrong}, which is not in the vocabulary of {vocab_size}")


def given_in(message: Any) -> dict[str, Any]:
    """Returns the fields that are set in a tandem.v1.SamplingParams, in the form that SamplingParams takes."""
    return {found.name: CONTAINERS.get(found.name, _same)(value) for found, value in message.ListFields()}


def _as_sent(value: float) -> float:
    """Returns a number rounded as llm.proto carries it; integers are sent exactly."""
    return c_float(value).value if isinstance(value, float) else value


def _same(value: Any) -> Any:
    return value


_FIELDS = dataclasses.fields(SamplingParams)
NAMES = tuple(one.name for one in _FIELDS)
DEFAULTS: dict[str, Any] = {name: getattr(SamplingParams(), name) for name in NAMES}
TYPES: dict[str, Any] = get_type_hints(SamplingParams)
RANGES: dict[str, tuple[float, float]] = {one.name: one.metadata["range"] for one in _FIELDS if "range" in one.metadata}
# The lower bounds, rounded as they are sent; and a reader of all values of one object.
LEAST = {name: _as_sent(low) for name, (low, _) in RANGES.items()}
VALUES = operator.attrgetter(*NAMES)
OF_MODEL = tuple(one.name for one in _FIELDS if one.metadata.get("of_model"))
CONTAINERS: dict[str, Any] = {
    one.name: one.default_factory for one in _FIELDS if one.default_factory is not dataclasses.MISSING
}
CONTAINERS["bad_words_token_ids"] = lambda value: tuple(tuple(one.ids) for one in value)
# Parameters that clients cannot set.
INTERNAL = frozenset({"bad_words_token_ids", "grammar", "thinking_begin_token_ids", "thinking_end_token_ids"})
