"""One checked request, from HTTP or gRPC.

OpenAI body | GenerateRequest     ->  parameters that the client gave
these + the model's defaults      ->  SamplingParams, checked (tandem/sampling.py)
prompts x n                       ->  one SequenceSpec per choice, sent to workers
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from opentelemetry.context import Context

from services.gateway.access import ANYONE, Caller
from services.gateway.admission import NO_TARGETS, Targets
from services.gateway.errors import InvalidRequest
from services.gateway.model import ServedModel
from services.gateway.text import UnreadText
from services.gateway.tools import ReadingPlan
from tandem.sampling import INTERNAL, InvalidParameter, SamplingParams, check_token_ids
from tandem.speculative import Speculative
from tandem.v1 import worker_pb2

MAX_SALT_LENGTH = 256


@dataclass(slots=True, eq=False)  # not frozen: frozen ones are slow to make
class Generation:
    """A checked request. Every prompt gets `n` choices; choice i belongs to prompt i // n."""

    operation: str  # "chat" or "text_completion", as GenAI telemetry names it
    request_id: str
    model: ServedModel
    prompts: Sequence[Sequence[int]]
    n: int
    given: Mapping[str, Any]  # the sampling parameters that the client named
    sampling: SamplingParams
    deadline: float  # on the event loop's clock
    arrived: float  # likewise
    priority: int = 0
    targets: Targets = NO_TARGETS
    tenant: str = ""
    client: Caller = ANYONE
    cache_salt: str = ""
    speculative: Speculative | None = None
    streamed: bool = False
    reading: ReadingPlan | None = None  # for answers that are more than text
    dimensions: int | None = None  # of embeddings, which are asked for instead of text; 0: all
    parent: Context | None = None
    # True if another model of the alias would answer and this one has no workers.
    elsewhere: Callable[[], bool] = lambda: False

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.n

    @property
    def stop_token_ids(self) -> frozenset[int]:
        """Returns the request's stop tokens, with end-of-text tokens if a grammar ends the answer by them."""
        ends = () if self.sampling.ignore_eos and not self.sampling.grammar else self.model.eos_token_ids
        return self.sampling.stop_token_ids.union(ends)

    def max_new_tokens(self, choice: int, max_model_len: int) -> int:
        room = max_model_len - len(self.prompts[choice // self.n])
        return min(max(1, self.sampling.max_tokens), self.client.tier.max_new_tokens or room, room)

    def num_packed(self, choice: int) -> int:
        """Returns about how many numbers the choice's sequence has, as packing takes time for each."""
        said = self.sampling
        others = len(said.stop_token_ids) + len(said.allowed_token_ids) + len(said.logit_bias)
        return len(self.prompts[choice // self.n]) + others

    def sequence(self, choice: int, max_model_len: int, seed: int) -> worker_pb2.SequenceSpec:
        """Returns the sequence that workers get for one choice; each attempt sets its request_id."""
        prompt, sampling = self.prompts[choice // self.n], self.sampling
        spec = worker_pb2.SequenceSpec(
            token_ids=prompt, priority=self.priority, cache_salt=self.cache_salt, tenant=self.tenant
        )
        if self.targets.itl_s is not None:
            spec.itl_target_ms = max(1, round(1000 * self.targets.itl_s))
        if self.speculative is not None:
            spec.speculative.method, spec.speculative.num_tokens = self.speculative.method, self.speculative.num_tokens
        if (ref := self.model.adapter) is not None:
            spec.adapter.name, spec.adapter.path, spec.adapter.revision = ref.name, ref.path, ref.revision
        if self.dimensions is not None:
            spec.embedding.dimensions = self.dimensions
        begin, end = self._thinking(prompt)
        asked = spec.sampling
        sampling.to_proto(asked)
        asked.max_tokens = self.max_new_tokens(choice, max_model_len)
        asked.seed = (seed + choice % self.n) % 2**64
        asked.stop_token_ids[:] = sorted(self.stop_token_ids)
        asked.thinking_begin_token_ids[:], asked.thinking_end_token_ids[:] = begin, end
        for known_here in ("stop", "bad_words"):
            asked.ClearField(known_here)
        return spec

    def _thinking(self, prompt: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the token ids that begin and end thoughts, for a thinking budget.

        The first is () if the prompt began them.
        """
        tokenizer, tags = self.model.tokenizer, self.model.thoughts
        if tags is None or self.sampling.thinking_token_budget is None:
            return (), ()
        text = "" if self.reading else tokenizer.decode(prompt, skip_special_tokens=False)
        opened = self.reading.opened if self.reading else text.rfind(tags.begin) > text.rfind(tags.end)
        return () if opened else tokenizer.token_ids(tags.begin), tokenizer.token_ids(tags.end)


async def read_sampling(
    given: Mapping[str, Any],
    model: ServedModel,
    vocab_size: int,
    names: Mapping[str, str] | None = None,
) -> SamplingParams:
    """
    Args:
        given: the client's parameters, by SamplingParams' names.
        vocab_size: bound of token ids.
        names: the API's names of parameters, where they differ.

    Raises:
        InvalidRequest: naming the first wrong field.
    """
    try:
        sampling = SamplingParams.of({**model.defaults, **given})
        sampling.check_vocabulary(vocab_size)
        check_token_ids("stop_token_ids", sampling.stop_token_ids, vocab_size)
        if sampling.thinking_token_budget is not None and model.thoughts is None:
            raise InvalidParameter(
                "thinking_token_budget", "must be unset: no marks of this model's thoughts are known"
            )
        if "allowed_token_ids" in given and not sampling.allowed_token_ids:
            raise InvalidParameter("allowed_token_ids", "must not be empty: no token could be chosen")
    except InvalidParameter as error:
        name = (names or {}).get(error.name, error.name)
        raise InvalidRequest(f"{name} {error.problem}", name) from None
    if not sampling.bad_words and INTERNAL.isdisjoint(given):
        return sampling
    spellings = await _spellings(sampling.bad_words, model)
    return replace(
        sampling,
        grammar="",
        bad_words_token_ids=tuple(sorted({ids for ids in spellings if ids})),
    )


async def _spellings(words: Sequence[str], model: ServedModel) -> Sequence[tuple[int, ...]]:
    """Raises InvalidRequest: the model's tokenizer cannot read one of the words."""
    try:
        return await model.tokenizer.spellings(words) if words else ()
    except UnreadText as error:
        raise InvalidRequest(f"bad_words: {error}", "bad_words", "tokenizer_failed") from None


def read_speculative(method: str, num_tokens: int | None) -> Speculative:
    """Raises InvalidRequest."""
    speculative = Speculative(method, Speculative.num_tokens if num_tokens is None else num_tokens)
    try:
        speculative.check()
    except ValueError as error:
        raise InvalidRequest(str(error), str(error).partition(":")[0]) from None
    return speculative


def check_salt(salt: str) -> str:
    """Raises InvalidRequest: the salt is too long."""
    if len(salt) > MAX_SALT_LENGTH:
        raise InvalidRequest(
            f"cache_salt must have at most {MAX_SALT_LENGTH} characters, got {len(salt)}", "cache_salt"
        )
    return salt
