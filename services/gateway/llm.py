"""The model behind both doors: what HTTP and gRPC share once a request has been read."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from opentelemetry.trace import Tracer

from services.gateway.access import ANYONE, Access, Allowances, Caller, check_tier
from services.gateway.admission import Intake, TextTurns
from services.gateway.bodies import Incoming, LargeBodies, PromptBounds, Reduce, is_large, rendered
from services.gateway.deadlines import Deadlines
from services.gateway.errors import GatewayError, InvalidRequest, ModelNotFound, Unavailable
from services.gateway.generation import (
    TOO_MANY,
    Answer,
    BackgroundTasks,
    CheckedGrammars,
    Generation,
    Pipeline,
    Structure,
    check_length,
    check_prompt,
    read_sampling,
    record_refused,
    tracing,
)
from services.gateway.metrics import Metrics
from services.gateway.model import ServedAdapters, ServedModel
from services.gateway.settings import Disaggregation, GatewaySettings
from services.gateway.text import CheckedIds, TemplateOptions, TooManyTokens
from services.gateway.workers import WorkerPool
from tandem.registry import ClusterView, LiveWorker, Role
from tandem.sampling import SamplingParams
from tandem.store import Store

MAX_TIMEOUT_S = 24 * 3600.0


@dataclass(slots=True)
class LLM:
    settings: GatewaySettings
    model: ServedModel
    view: ClusterView
    pool: WorkerPool
    pipeline: Pipeline
    metrics: Metrics
    access: Access
    adapters: ServedAdapters
    allowances: Allowances
    new_id: Callable[[], str]
    spans: Tracer
    seeds: random.Random
    deadlines: Deadlines
    intake: Intake
    bodies: LargeBodies
    text_turns: TextTurns
    grammars: CheckedGrammars
    store: Store | None = None
    detached: BackgroundTasks = field(default_factory=BackgroundTasks)  # answers that nobody waits for
    running: set[Answer] = field(default_factory=set)
    accepted: int = 0
    leaving: bool = False  # balancers should send nothing more; what comes is served
    stopping: bool = False
    _longest: tuple[Sequence[LiveWorker] | None, int] = (None, 0)

    @property
    def max_model_len(self) -> int:
        """The model's own, or what the smallest of its workers allows, or what the largest decode pool can hold.

        Counted once for each time that the view is read.
        """
        if self._longest[0] is not self.view.workers:
            self._longest = self.view.workers, self._max_model_len()
        return self._longest[1]

    def _max_model_len(self) -> int:
        infos = [worker.info for worker in self.pool.workers]
        pools = (info.num_blocks * info.block_size for info in infos if info.role is Role.DECODE)
        longest = min([self.model.max_model_len, *(info.max_model_len for info in infos)])
        return min(longest, max(pools, default=longest))

    def served(self, name: str, client: Caller = ANYONE) -> ServedModel:
        """The model, by whichever of its names, or one of its adapters.

        Raises:
            ModelNotFound: also where the client's key does not allow it.
        """
        if not self._allows(client, name) or (found := self._find(name)) is None:
            raise ModelNotFound(
                f"model {name!r} is not served here; model {self.model.name!r} is", "model", "model_not_found"
            )
        return found

    def _find(self, name: str) -> ServedModel | None:
        if name == self.model.name:
            return self.model
        if name in self.settings.served_names:
            return replace(self.model, name=name)
        adapter = self.adapters.find(name)
        return None if adapter is None else self.model.adapted(adapter)

    def _allows(self, client: Caller, name: str) -> bool:
        """A key for the model is one for all of its names."""
        return client.may_use(name) or (name in self.settings.served_names and client.may_use(self.model.name))

    def models(self, client: Caller) -> list[ServedModel]:
        """Those that the client may use."""
        names = dict.fromkeys((self.model.name, *self.settings.served_names, *self.adapters.names))
        return [self.served(name, client) for name in names if self._allows(client, name)]

    def deadline(self, seconds: float | None, param: str | None = None) -> float:
        """When a request ends that may take so long, or the default. On the event loop's clock.

        Raises:
            InvalidRequest: naming `param`.
        """
        if seconds is not None and not 0 < seconds <= MAX_TIMEOUT_S:
            raise InvalidRequest(f"{param} must be above 0 and at most {MAX_TIMEOUT_S:.0f} seconds", param)
        return asyncio.get_running_loop().time() + (self.settings.timeout_s if seconds is None else seconds)

    async def encode(self, text: str, param: str, add_special_tokens: bool = True) -> CheckedIds:
        """
        Raises:
            InvalidRequest: it is longer than any text of so many tokens as the model takes.
        """
        self.bounds.check_characters(len(text), param)
        try:
            return await self.model.tokenizer.encode(text, add_special_tokens)
        except TooManyTokens as error:
            raise InvalidRequest(f"{param}: {error}", param, "context_length_exceeded") from None

    async def encode_each(self, prompts: Sequence[str | Sequence[int]], param: str) -> list[Sequence[int]]:
        """Texts as token ids; many short ones together take as long as one that is long.

        Raises:
            InvalidRequest: as `encode`.
        """
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        for text in texts:
            self.bounds.check_characters(len(text), param)
        try:
            made = iter(await self.model.tokenizer.encode_each(texts))
        except TooManyTokens as error:
            raise InvalidRequest(f"{param}: {error}", param, "context_length_exceeded") from None
        return [next(made) if isinstance(prompt, str) else prompt for prompt in prompts]

    def render_chat(self, messages: Sequence[Mapping[str, Any]], options: TemplateOptions) -> str:
        """
        Raises:
            InvalidRequest: as `rendered`.
        """
        return rendered(messages, options, self.model.chat_template, self.bounds)

    @property
    def bounds(self) -> PromptBounds:
        longest, tokenizer = self.max_model_len, self.model.tokenizer
        return PromptBounds(self.settings.max_choices, longest, longest * tokenizer.longest_token, tokenizer.vocab_size)

    async def sampling(
        self, given: Mapping[str, Any], names: Mapping[str, str], structure: Structure | None, caller: str
    ) -> SamplingParams:
        """As `read_sampling`, of an answer that follows `structure`.

        Raises:
            InvalidRequest | Unavailable
        """
        found = await read_sampling(given, self.model, names)
        grammar = await self.grammars.grammar_for(structure, caller)
        return replace(found, grammar=grammar) if grammar else found

    async def incoming(self, reduce: Reduce, body: bytes, caller: str) -> Incoming:
        """A large body comes as `reduced`, another as it is.

        Raises:
            GatewayError
        """
        return await self.reduced(reduce, body, caller) if is_large(body) else Incoming(body)

    async def reduced(self, reduce: Reduce, body: bytes, caller: str) -> Incoming:
        """Take over what the helper process has made of a large body.

        Args:
            caller: callers take turns there.

        Raises:
            GatewayError
        """
        return await self.bodies.read(reduce, body, self.bounds, self.model.chat_template, caller=caller)

    def answer(self, request: Generation, param: str) -> Answer:
        """Nothing is sent to a worker before the answer's deltas are asked for.

        Args:
            param: the field that the prompts came in.

        Raises:
            InvalidRequest: a prompt is empty, too long or not in the vocabulary.
            Unavailable: the gateway is stopping.
        """
        if self.stopping:
            raise Unavailable("the gateway is stopping", code="stopping")
        self.accepted += 1
        longest = self.max_model_len
        for prompt in request.prompts:
            check_length(prompt, request.given.get("max_tokens"), longest, param)
            check_tier(request.client.tier, len(prompt), request.given.get("max_tokens"), param)
            if not isinstance(prompt, CheckedIds):
                check_prompt(prompt, self.model.tokenizer.vocab_size, param)
        seed = request.given.get("seed")
        return Answer(
            request, self.pipeline, self.allowances, self.running,
            max_model_len=longest, seed=self.seeds.getrandbits(63) if seed is None else seed,
        )  # fmt: skip

    def refuse(self, headers: Mapping[str, str], request_id: str, error: GatewayError, arrived: float) -> None:
        """Count, trace and record a request that failed before anything was asked of the cluster.

        Args:
            headers: of HTTP, or gRPC metadata.
            arrived: on the event loop's clock.
        """
        after_s = asyncio.get_running_loop().time() - arrived
        self.metrics.request("none", error.status)
        self.metrics.error(error)
        if error.status == TOO_MANY:
            self.metrics.refused(after_s)
        tracing.refused(self.spans, headers, request_id, error, after_s)
        record_refused(self.pipeline.records, request_id, error, after_s)

    def readiness(self) -> tuple[bool, dict[str, Any]]:
        """Says if a request would be served now, and which workers there are."""
        workers = [worker for worker in self.pool.workers if not worker.load.draining]
        prefills = [w for w in workers if w.info.role is Role.PREFILL and self.pool.connected(w.info)]
        decodes = [worker for worker in workers if worker.info.role is Role.DECODE]
        connected = [worker.info for worker in decodes if self.pool.connected(worker.info)]
        pairs = sum(
            info.incarnation in prefill.load.linked and info.layout_hash == prefill.info.layout_hash
            for prefill in prefills
            for info in connected
        )
        missing = []
        if self.leaving or self.stopping:
            missing.append("the gateway is stopping")
        if not connected:
            refused = self.pool.refused.values()
            missing.append("; ".join(["decode: no worker with an open stream", *sorted(refused)]))
        if not pairs and self.settings.disaggregation is Disaggregation.REQUIRE:
            missing.append("prefill: no worker with a proven link to a connected decode worker")
        return not missing, {
            "ready": not missing,
            "missing": missing,
            "prefill_workers": len(prefills),
            "decode_workers": len(decodes),
            "linked_pairs": pairs,
            "refused_workers": sorted(self.pool.refused.values()),
            "sequences": sum(worker.info.max_num_seqs for worker in decodes),
            "kv_tokens": sum(worker.info.num_blocks * worker.info.block_size for worker in decodes),
            "registry_reached": not self.view.stale,
        }
