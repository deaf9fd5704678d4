"""One request's answer: its choices side by side, merged into one stream of deltas; its span and its metrics.

    choice 0: pipeline -> text ─┐
    choice 1: pipeline -> text ─┼─> deltas, as they come ──> HTTP or gRPC
    choice 2: pipeline -> text ─┘

The first choice that fails fails the answer, and ends the others. Closing `deltas` ends all of them.
A single choice's deltas may be written where the worker's message is read: see `write_at_once`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from functools import partial
from hashlib import blake2b
from typing import Any

from opentelemetry.trace import Span

from services.gateway.access import Allowances, headers_of
from services.gateway.admission import PriorityClass
from services.gateway.errors import GatewayError
from services.gateway.generation import tracing
from services.gateway.generation.choice import REASONS, Choice
from services.gateway.generation.choice_text import ChoiceText, Delta
from services.gateway.generation.pipeline import Pipeline
from services.gateway.generation.record import fields_of, is_slow
from services.gateway.generation.request import Generation
from services.gateway.generation.shared_prompt import MIN_SHARED_TOKENS, SharedPrompt
from services.gateway.telemetry import PATHS, Ending, Fields, RequestEnd
from services.gateway.workers import Tokens
from tandem.registry import Taken
from tandem.v1 import llm_pb2

CLIENT_LEFT, TOO_MANY = 499, 429


class Answer:
    """The answer to one request. Read `deltas` once; everything else may be read at any time."""

    def __init__(
        self, request: Generation, pipeline: Pipeline, allowances: Allowances, running: set[Answer],
        *, max_model_len: int, seed: int,
    ) -> None:  # fmt: skip
        """`running`: the set that holds this answer while its deltas are read."""
        self.request = request
        self._pipeline, self._metrics = pipeline, pipeline.metrics
        self._allowances = allowances
        self._limit_headers: dict[str, str] = {}
        self._running = running
        self._max_model_len, self._seed = max_model_len, seed
        tokenizer, stop_ids = request.model.tokenizer, request.stop_token_ids
        texts = (
            ChoiceText(i, tokenizer, request.sampling, stop_ids, request.reading) for i in range(request.num_choices)
        )
        self.choices = [Choice(request, i, text) for i, text in enumerate(texts)]
        self._shared = [
            SharedPrompt() if request.n > 1 and len(prompt) >= MIN_SHARED_TOKENS else None for prompt in request.prompts
        ]

    @property
    def usage(self) -> llm_pb2.Usage:
        """Token counts. A prompt counts once, however many choices it has."""
        written = reasoning = proposed = accepted = 0
        for choice in self.choices:
            written += choice.text.num_tokens
            reasoning += choice.text.num_reasoning_tokens
            proposed += choice.num_proposed_tokens
            accepted += choice.num_accepted_tokens
        return llm_pb2.Usage(
            prompt_tokens=sum(map(len, self.request.prompts)), completion_tokens=written,
            cached_tokens=self._num_cached_tokens, proposed_tokens=proposed, accepted_tokens=accepted,
            reasoning_tokens=reasoning,
        )  # fmt: skip

    @property
    def _num_cached_tokens(self) -> int:
        return sum(choice.num_cached_tokens for choice in self.choices[:: self.request.n])

    @property
    def path(self) -> llm_pb2.Path:
        """The path through the cluster of the first choice that has one."""
        if len(self.choices) == 1:
            return self.choices[0].path
        return next((choice.path for choice in self.choices if choice.path.kind), self.choices[0].path)

    @property
    def revision(self) -> str | None:
        """The revision of the weights that computed the choice of `path`."""
        return next((choice.revision for choice in self.choices if choice.path.kind), None)

    def call_id(self, choice: int, index: int) -> str:
        """Returns the id of one tool call."""
        assert self.request.reading is not None
        choice_id = self.choices[choice].sequence.choice_id
        return self.request.reading.call_id(blake2b(f"{choice_id}-{index}".encode()).hexdigest())

    def limit_headers(self) -> dict[str, str]:
        """Returns what is left of the tenant's limits as headers; known before the path is."""
        return self._limit_headers

    def path_headers(self) -> dict[str, str]:
        """Returns the path and its reason, as far as known, as HTTP headers or gRPC trailers."""
        path, via = self.path, self.request.model.via
        said = {
            "x-tandem-path": PATHS.get(path.kind, "none"),
            "x-tandem-prefill-worker": path.prefill_worker,
            "x-tandem-decode-worker": path.decode_worker,
            "x-tandem-cached-tokens": str(self._num_cached_tokens),
            "x-tandem-transfer-bytes": str(path.transfer_bytes),
            "x-tandem-transport": path.transport,
            "x-tandem-reason": path.reason,
            "x-tandem-migrated": str(path.migrated or ""),
            "x-tandem-model": via.model if via else "",
            "x-tandem-model-reason": via.reason if via else "",
        }
        if path.refused_transports:
            refused = path.refused_transports.items()
            said["x-tandem-refused-transports"] = "; ".join(f"{name}: {why}" for name, why in refused)
        return {name: _header_value(value) for name, value in said.items() if value} | self._limit_headers

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        """Raises GatewayError."""
        self._running.add(self)
        now = asyncio.get_running_loop().time
        span = tracing.start_root(self._pipeline.cluster.spans, self.request)
        status, outcome, taken, first_s = CLIENT_LEFT, "client_left", None, None
        try:
            taken = await self._take()
            async with aclosing(self._merged(span)) as deltas:
                async for delta in deltas:
                    if first_s is None and delta.tokens.ids:
                        first_s = now() - self.request.arrived
                        tracing.note_first(span, first_s)
                    yield delta
            status, outcome = 200, "ok"
        except GatewayError as error:
            status, outcome = error.status, error.type
            self._metrics.error(error)
            tracing.fail(span, error, outcome)
            raise
        except BaseException as error:
            if isinstance(error, Exception):  # a bug, not a reader that stopped
                status, outcome = 500, "internal_error"
            tracing.fail(span, error, outcome)
            raise
        finally:
            whole_s = now() - self.request.arrived
            end = Ending(status, outcome, first_s, whole_s, span.get_span_context().trace_id)
            self._settle(taken)
            self._running.discard(self)
            self._end(span, end)
            self._pipeline.records.add("request", partial(self._counted, end), span)

    def write_at_once(self, write: Callable[[Delta], bool]) -> None:
        """Fast path: from now on, while the reader of `deltas` waits, deltas that end nothing may go straight to
        `write`.

        Args:
            write: returns False if it can take no more; the reader then gets an empty delta.
        """
        if len(self.choices) == 1 and not self.request.sampling.stop:
            self.choices[0].write = write
        # several choices take turns, and a stop string must be able to end the reader's wait

    async def _take(self) -> Taken | None:
        """Charge the tenant's limits. Raises RateLimited and InvalidRequest."""
        request = self.request
        taken = await self._allowances.take(
            request.client, request.tenant, request.request_id, sum(map(len, request.prompts)),
            sum(request.max_new_tokens(i, self._max_model_len) for i in range(request.num_choices)),
            request.deadline - asyncio.get_running_loop().time(),
        )  # fmt: skip
        self._limit_headers = headers_of(taken) if taken else {}
        return taken

    def _settle(self, taken: Taken | None) -> None:
        if taken is not None:
            usage = self.usage
            used = (
                (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) if usage.completion_tokens else ()
            )
            self._allowances.settle(self.request.client, taken, *used)

    def _merged(self, span: Span) -> AsyncGenerator[Delta, None]:
        runs = [self._run(choice, span) for choice in self.choices]
        return runs[0] if len(runs) == 1 else merge(runs)

    async def _run(self, choice: Choice, span: Span) -> AsyncGenerator[Delta, None]:
        await self._pipeline.begin(choice, self._max_model_len, self._seed, span)
        try:
            async with aclosing(self._tokens(choice)) as tokens:
                async for new in tokens:
                    delta = choice.read(new)
                    yield delta
                    if delta.finish_reason:
                        break
            choice.succeed()
        finally:
            choice.end()

    def _tokens(self, choice: Choice) -> AsyncGenerator[Tokens, None]:
        """Yields the tokens of one choice. A prompt's first choice has it prefilled for the others."""
        shared, is_first = self._shared[choice.index // self.request.n], choice.index % self.request.n == 0
        if shared is None:
            return self._pipeline.tokens(choice)
        if is_first:
            return shared.of_first(self._pipeline.tokens(choice), choice)
        choice.sequence.sampling.ClearField("prompt_logprobs")
        return shared.of_other(self._pipeline.tokens(choice, shared))

    def _end(self, span: Span, end: Ending) -> None:
        if span.is_recording():
            usage, status = self.usage, end.status
            if usage.completion_tokens or status == 200:
                tracing.set_usage(span, usage)
            tracing.hint(span, status, is_slow(self, end.first_s))
            span.set_attributes(self._outcome(status, PATHS.get(self.path.kind, "none")))
        span.end()

    def _counted(self, end: Ending) -> Fields:
        """Count the request shortly after its end. Returns the fields of its record."""
        usage = self.usage
        self._count(end, usage)
        self._count_of_tenant(end, usage)
        return fields_of(self, end, usage)

    def _count(self, end: Ending, usage: llm_pb2.Usage) -> None:
        metrics, status = self._metrics, end.status
        metrics.request(PATHS.get(self.path.kind, "none"), status)
        if status == TOO_MANY:
            metrics.refused(end.whole_s)
        if status == 200:
            metrics.prefix_cache_queries.inc(usage.prompt_tokens)
            metrics.prefix_cache_hits.inc(usage.cached_tokens)
            metrics.ended.max_generated.observe(max(choice.text.num_tokens for choice in self.choices))
            metrics.ended.params_n.observe(self.request.n)
            metrics.ended.params_max_tokens.observe(max(choice.sequence.sampling.max_tokens for choice in self.choices))
        if usage.proposed_tokens:
            metrics.proposed_tokens.inc(usage.proposed_tokens)
            metrics.accepted_tokens.inc(usage.accepted_tokens)
        for choice in self.choices:
            metrics.path(choice.path, choice.fallback)

    def _outcome(self, status: int, kind: str) -> dict[str, Any]:
        """Returns the final attributes of the request's span, without those of phases that it did not reach."""
        told: dict[str, Any] = {
            "gen_ai.response.finish_reasons": [REASONS.get(c.text.finish_reason, "error") for c in self.choices],
            "http.response.status_code": status,
            "tandem.path": kind,
            "tandem.migrated": sum(choice.migrated for choice in self.choices),
        }
        if queued_s := max(choice.queued_s for choice in self.choices):
            told["gen_ai.latency.time_in_queue"] = queued_s
        if self.path.kind:
            told["tandem.path.reason"] = self.path.reason
            told["kv.transfer.bytes"] = sum(choice.path.transfer_bytes for choice in self.choices)
        return told

    def _count_of_tenant(self, end: Ending, usage: llm_pb2.Usage) -> None:
        """Count the request for its tenant, its class and OTLP collectors."""
        request = self.request
        gaps = [choice.itl_s for choice in self.choices if choice.itl_s is not None]
        used = (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens) if usage.completion_tokens else ()
        kind, itl_s = PriorityClass.of(request.priority), max(gaps, default=None)
        self._metrics.tenants.ended(RequestEnd(request.tenant, kind, end.status, end.first_s, itl_s, *used))
        error, tokens = "" if end.status == 200 else end.outcome, (usage.prompt_tokens, usage.completion_tokens)
        times = end.whole_s, end.first_s, itl_s
        self._metrics.genai.ended(request.operation, request.model.name, error, times, tokens)


def _header_value(value: str) -> str:
    """Returns a text as one line of printable ASCII."""
    if value.isascii() and value.isprintable():
        return value
    return " ".join(value.split()).encode("ascii", "replace").decode()


async def merge(runs: Sequence[AsyncGenerator[Delta, None]]) -> AsyncGenerator[Delta, None]:
    """Yields the pieces of all runs as they come. One failure ends all runs and is raised.

    A reader that pauses stops the runs: one piece for each run waits in the queue, and one in each run.
    """
    # Bounded by `room`, which the None at a run's end does not need.
    queue: asyncio.Queue[Delta | None] = asyncio.Queue()
    room = asyncio.Semaphore(len(runs))

    async def pump(run: AsyncGenerator[Delta, None]) -> None:
        try:
            async with aclosing(run):
                async for delta in run:
                    await room.acquire()
                    queue.put_nowait(delta)
        finally:
            queue.put_nowait(None)

    tasks = [asyncio.create_task(pump(run)) for run in runs]
    try:
        for _ in tasks:
            while (delta := await queue.get()) is not None:
                room.release()
                yield delta
            for task in tasks:
                if task.done():
                    task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
