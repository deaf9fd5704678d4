"""One model as requests for it need it: bounds, text to tokens, sampling parameters, answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from services.gateway.access import check_tier
from services.gateway.admission import Admission
from services.gateway.bodies import BodyReader, ChatPrompt, Incoming, Prompt, PromptBounds, Reduced, is_large
from services.gateway.errors import InvalidRequest, Unavailable
from services.gateway.generation import (
    Answer,
    Generation,
    Pipeline,
    Structure,
    read_sampling,
)
from services.gateway.model import ServedModel, Via
from services.gateway.shared import Shared
from services.gateway.telemetry import Metrics
from services.gateway.text import CheckedIds, TooManyTokens, UnreadText
from services.gateway.untrusted import ChatTemplate
from services.gateway.workers import WorkerPool
from tandem.registry import LiveWorker, ModelKey, Role
from tandem.sampling import SamplingParams

B = TypeVar("B")
MAX_CHOICES = 128  # prompts times n of one request
# Reduces a large body in a helper process.
Reduce = Callable[[bytes, PromptBounds, ChatTemplate | None], Reduced]


@dataclass(slots=True)
class LLM:
    key: ModelKey
    model: ServedModel
    pool: WorkerPool
    pipeline: Pipeline
    admission: Admission
    metrics: Metrics
    shared: Shared
    note_use: Callable[[], None]
    via: Via | None = None  # how an alias chose this model; set in a copy for one request
    _sizes: tuple[Sequence[LiveWorker] | None, int, int] = (None, 0, 0)

    @property
    def max_model_len(self) -> int:
        """The least of the model's limit, its workers' limits, and what the largest decode pool can hold, in tokens."""
        return self._of_workers[1]

    @property
    def vocab_size(self) -> int:
        """The bound of token ids that workers take. Some ids below it may have no text."""
        return self._of_workers[2]

    @property
    def _of_workers(self) -> tuple[Sequence[LiveWorker] | None, int, int]:
        """The view's workers, max_model_len and vocab_size, computed once for each refresh of the view."""
        workers = self.shared.view.workers
        if self._sizes[0] is not workers:
            infos = [worker.info for worker in self.pool.workers]
            pools = (info.num_blocks * info.block_size for info in infos if info.role is Role.DECODE)
            longest = min([self.model.max_model_len, *(info.max_model_len for info in infos)])
            reported = (info.vocab_size for info in infos if info.vocab_size)
            vocab_size = min(reported, default=self.model.tokenizer.vocab_size)
            self._sizes = workers, min(longest, max(pools, default=longest)), vocab_size
        return self._sizes

    @property
    def seats(self) -> int:
        """The number of answers that its workers write at once; workers that never answered do not count."""
        decodes = [worker for worker in self.pool.workers if worker.info.role is Role.DECODE]
        able = [worker.info for worker in decodes if not worker.load.draining and self.pool.has_met(worker.info)]
        return sum(info.max_num_seqs for info in able)

    async def encode(self, text: str, param: str, add_special_tokens: bool = True) -> CheckedIds:
        """Raises InvalidRequest: the text is longer than any that fits the model's context."""
        self.bounds.check_characters(len(text), param)
        with _refused(param):
            return await self.model.tokenizer.encode(text, add_special_tokens)

    async def encode_chat(self, text: str, salt: str) -> CheckedIds:
        """Returns the token ids of rendered messages, tokenizing only what is new since others of the same salt.

        Raises:
            InvalidRequest: as `encode`.
        """
        self.bounds.check_characters(len(text), "messages")
        with _refused("messages"):
            return await self.model.tokenizer.encode_chat(text, salt)

    async def encode_each(self, prompts: Sequence[str | Sequence[int]], param: str) -> list[Sequence[int]]:
        """Returns prompts as token ids. Many short texts together take as long as one long text.

        Raises:
            InvalidRequest: as `encode`.
        """
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        for text in texts:
            self.bounds.check_characters(len(text), param)
        with _refused(param):
            made = iter(await self.model.tokenizer.encode_each(texts))
        return [next(made) if isinstance(prompt, str) else prompt for prompt in prompts]

    async def render_chat(self, chat: ChatPrompt) -> str:
        """Raises GatewayError: as `ModelHelper.render`."""
        return await self.model.helper.render(self.model.chat_template, chat, self.bounds)

    @property
    def bounds(self) -> PromptBounds:
        longest, longest_token = self.max_model_len, self.model.tokenizer.longest_token
        return PromptBounds(MAX_CHOICES, longest, longest * longest_token, self.vocab_size)

    async def sampling(
        self, given: Mapping[str, Any], names: Mapping[str, str], structure: Structure | None, caller: str
    ) -> SamplingParams:
        """Returns sampling parameters as `read_sampling` does, with the grammar of `structure`.

        Raises InvalidRequest | Unavailable.
        """
        found = await read_sampling(given, self.model, self.vocab_size, names)
        grammar = await self.shared.grammars.grammar_for(structure, caller)
        return replace(found, grammar=grammar) if grammar else found

    async def read(self, reader: BodyReader[B], data: bytes, owner: str) -> Incoming[B]:
        """Returns a body, read on the loop, or in the helper process if it is large. Owners take turns there.

        Raises GatewayError.
        """
        if not is_large(data):  # as nearly all are
            return Incoming(reader, reader.parse(data), owner)
        return await self.read_large(reader, data, owner)

    async def read_large(self, reader: BodyReader[B], data: bytes, owner: str) -> Incoming[B]:
        """Raises GatewayError."""
        reduced = await self.reduced(reader.reduce, data, owner)
        return Incoming(reader, reader.parse(reduced.fields), owner, reduced)

    async def reduced(self, reduce: Reduce, data: bytes, owner: str) -> Reduced:
        """Returns a large body as the helper process reduces it. Raises GatewayError."""
        return await self.shared.bodies.read(reduce, data, self.bounds, self.model.chat_template, caller=owner)

    def prompts_in(self, body: Incoming[Any]) -> Sequence[Prompt]:
        """Raises InvalidRequest."""
        said = body.prompts(self.bounds, self.model.chat_template)
        assert not isinstance(said, ChatPrompt)
        return said

    async def text_of(self, body: Incoming[Any]) -> str:
        """Returns the text of a body's only prompt, rendered if it is a chat. Raises GatewayError."""
        said = body.prompts(self.bounds, self.model.chat_template)
        if isinstance(said, ChatPrompt):
            return await self.render_chat(said)
        (text,) = said
        assert isinstance(text, str)
        return text

    def answer(self, request: Generation, param: str) -> Answer:
        """Returns the answer to a request. Nothing is sent to a worker before its deltas are read.

        Args:
            param: the field that the prompts came in.

        Raises:
            InvalidRequest: a prompt is empty, too long or not in the vocabulary.
            Unavailable: the gateway is stopping.
        """
        shared, state = self.shared, self.shared.state
        if state.stopping:
            raise Unavailable("the gateway is stopping", code="stopping")
        state.accepted += 1
        self.note_use()
        self.metrics.of_fingerprint(self.key.fingerprint).inc()
        if via := request.model.via:
            shared.metrics.alias(via.alias, via.model, "fallback" if via.lacking else "weight")
        bounds = self.bounds
        for prompt in request.prompts:
            bounds.check_length(prompt, request.given.get("max_tokens"), param)
            check_tier(request.client.tier, len(prompt), request.given.get("max_tokens"), param)
            if not isinstance(prompt, CheckedIds):
                bounds.check_ids(prompt, param)
        seed = request.given.get("seed")
        return Answer(
            request, self.pipeline, shared.allowances, state.running,
            max_model_len=bounds.tokens, seed=shared.seeds.getrandbits(63) if seed is None else seed,
        )  # fmt: skip


@contextmanager
def _refused(param: str) -> Iterator[None]:
    """Translate the tokenizer's refusal of the text in the field `param`."""
    try:
        yield
    except TooManyTokens as error:
        raise InvalidRequest(f"{param}: {error}", param, "context_length_exceeded") from None
    except UnreadText as error:
        raise InvalidRequest(f"{param}: {error}", param, "tokenizer_failed") from None
