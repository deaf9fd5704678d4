"""Token ids in, token ids out.

    add ────────────────┐                                   ┌──> SequenceOutput
    reserve ─> join ────┴─> step: schedule, execute, update ┴──> KVSink.push (while executing)
    abort, any time

Only one thread at a time calls methods, but while a step computes a second thread may reserve free blocks. The engine
owns the weights, the KV cache and every sequence between its add or reserve and its last output or abort.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import chain

import torch

from tandem.containment import COMPUTING, NOBODY, SUSPECT, CrashPage
from tandem.engine.build import Ports, build, max_prefill_beside_decode
from tandem.engine.cores import Cores
from tandem.engine.device import open_device
from tandem.engine.fitting import sized
from tandem.engine.kv import SwapSpace
from tandem.engine.parallel import StartRank, as_processes
from tandem.engine.pooling import Poolings
from tandem.engine.sampling import NamedGuide
from tandem.engine.scheduling import (
    AnswerLengths,
    BlockPool,
    Pace,
    Scheduled,
    Scheduler,
    Sequence,
    SequenceBlocks,
    Status,
    new_sequence,
)
from tandem.engine.speculation import Speculator
from tandem.engine.types import (
    BlockRemoved,
    BlockStored,
    EngineConfig,
    EngineStats,
    FinishReason,
    KVSink,
    Progress,
    Request,
    SampledToken,
    SequenceOutput,
)
from tandem.grammar import Grammars
from tandem.machine.resources import usable_cpus
from tandem.sampling import InvalidParameter
from tandem.speculative import OFF, Speculative

ALONE: AbstractContextManager[None] = nullcontext()


class Engine:
    """Loads a model and runs sequences on it.

    `layout` describes the KV bytes, `kv_cache[layer]` holds them, `moving` tracks blocks that travel to or from other
    caches, `model_config` describes the model. Raises ValueError naming the wrong field of the config or file.
    `on_progress` is called while weights load. A null engine spends its steps' time in `sleep`; any engine measures
    its steps with `now`. Any thread may use `grammars` and `adapters` (None where the engine takes no adapters).
    `crash_page` always records which requests the engine computes. `ranks`, which `start_rank` started, compute steps
    together with this process; close them at the end.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        on_progress: Progress | None = None,
        crash_page: CrashPage | None = None,
        sleep: Callable[[float], None] = time.sleep,
        now: Callable[[], float] = time.monotonic,
        start_rank: StartRank = as_processes,
    ) -> None:
        torch.set_num_threads(config.num_threads or min(torch.get_num_threads(), usable_cpus()))
        config = sized(config, open_device(config.device))
        self._cores = Cores(torch.get_num_threads(), config.shared_cores)
        parts = build(config, self._cores, Ports(on_progress, sleep, start_rank))
        self.model_config, self.layout, self.kv_cache, self._runner = *parts[:3], parts.runner
        self.adapters, self.ranks, self.crash_page = parts.adapters, parts.ranks, crash_page or CrashPage()
        self.grammars = Grammars(config.model_path, self.model_config.vocab_size)
        self._pool = BlockPool(parts.num_blocks, parts.windows)
        most_swapped = config.swap_memory // self.layout.whole_block_bytes
        self._swap = SwapSpace(self.kv_cache, min(parts.num_blocks, most_swapped), now, parts.windows)
        most = config.max_prefill_beside_decode or config.max_num_batched_tokens
        self._pace = Pace(most, max_prefill_beside_decode(config, self.model_config))
        self._blocks = SequenceBlocks(
            self._pool, self._swap, block_size=config.block_size, prefix_caching=config.enable_prefix_caching
        )
        self._scheduler = Scheduler(
            self._blocks, max_num_batched_tokens=config.max_num_batched_tokens, pace=self._pace,
            max_num_seqs=config.max_num_seqs or self._pool.num_blocks, overlaps=self._runner.overlaps,
        )  # fmt: skip
        self.max_num_seqs = self._scheduler.max_num_seqs
        self._speculator = Speculator(
            parts.proposers, self._scheduler, self.model_config.max_model_len, now, jump_forward=config.jump_forward
        )
        config.speculative.check(self._speculator.methods)
        self._speculative, self._now, self.moving = config.speculative, now, self._blocks.moving
        self._live, self._poolings = dict[str, Sequence](), Poolings(config, self.model_config.hidden_size)
        self._num_arrived = self._num_computed = self._num_written = self._num_aborted = self._num_aborted_blocks = 0
        self._lengths = AnswerLengths(config.likely_answer)

    def add(
        self, request: Request, *, sink: KVSink | None = None, first_block: int = 0, prefill_only: bool = False
    ) -> None:
        """Queues a request. Raises ValueError naming a field that can never be served.

        `sink` gets the prompt's blocks from `first_block` on: a block as soon as a chunk completes it, blocks found in
        the prefix cache with the first chunk, a part-full last block with the last chunk. `prefill_only` ends the
        sequence with its first token.
        """
        total = len(request.token_ids) if prefill_only else self._max_tokens(request)
        seq = self._new_sequence(request, total, OFF if prefill_only else request.speculative)
        seq.sink, seq.num_pushed_blocks, seq.prefill_only = sink, first_block, prefill_only
        if request.sampling.prompt_logprobs is not None and not request.num_prior_tokens:
            seq.num_prompt_logprobs = seq.num_prompt_tokens - 1
        if request.dimensions is not None:
            seq.pool = self._poolings.pooling(request.dimensions)
        self._scheduler.add(seq)
        self._live[seq.request_id] = seq

    def reserve(self, request: Request, outranks: bool = True) -> int | None:
        """Takes blocks for the prompt and a likely answer and parks the sequence until `join`; None if there is no room
        now. A longer answer takes more blocks as it grows, and may be preempted for them without changing a token.
        Sequences of lower priority are preempted for it, unless `outranks` is False: then it may run beside a step.

        Returns how many of the prompt's tokens, a multiple of block_size and never all, this engine has cached already.
        Raises ValueError naming a field that can never be served.
        """
        total = self._max_tokens(request)
        seq = self._new_sequence(request, total, request.speculative)
        if not self._scheduler.reserve(seq, min(total, seq.num_prompt_tokens + self._lengths.likely_left), outranks):
            return None
        if outranks:
            self._swap.copy(*self._blocks.take_copies())  # copies out preempted KV before other KV arrives there
        self._live[seq.request_id] = seq
        return seq.num_cached_tokens

    def check(self, request: Request) -> None:
        """Raises ValueError naming a field for which `reserve` would never take the request."""
        self._check(request, self._max_tokens(request), request.speculative or self._speculative)

    def landing_blocks(self, request_id: str) -> list[int]:
        """Returns the blocks of a reserved sequence's prompt: physical ids in logical order, cached blocks included."""
        seq = self._reserved(request_id)
        return seq.block_table[: self._blocks.blocks_for(seq.num_prompt_tokens)]

    def landing_places(self, request_id: str) -> list[int]:
        """Returns where `landing_blocks` lie in layers with a window, 0: nowhere; empty if there are no such layers."""
        seq, windows = self._reserved(request_id), self._pool.windows
        return [] if windows is None else [windows.at[block] for block in self.landing_blocks(seq.request_id)]

    def join(self, request_id: str, first_token: SampledToken) -> SequenceOutput | None:
        """Starts decoding a reserved sequence at token 1: its prompt's KV is in place and prefill has sampled token 0.

        Returns the sequence's end, with no tokens, if token 0 already ends it.
        """
        seq = self._reserved(request_id)
        self._check_token_ids("first_token", [first_token.token_id])
        self._scheduler.join(seq)
        seq.token_ids.append(first_token.token_id)
        reason = seq.check_stop(self.model_config.max_model_len)
        if reason is None:
            return None
        self._remove(seq)
        self._rest_when_idle()
        return SequenceOutput(request_id, seq.num_output_tokens, [], reason, seq.num_cached_tokens or 0, finished=True)

    def abort(self, request_id: str) -> bool:
        """Ends a sequence in any state, frees all that it holds and emits no more output; False if it is unknown."""
        seq = self._live.get(request_id)
        if seq is not None:
            free = self._pool.num_free
            self._remove(seq)
            self._num_aborted += 1
            self._num_aborted_blocks += self._pool.num_free - free
            self._rest_when_idle()
        return seq is not None

    def step(self, computing: AbstractContextManager[None] = ALONE) -> list[SequenceOutput]:
        """Computes one batch and returns the outputs of sequences that got tokens or ended. Within `computing` it reads
        and writes only the batch's own sequences and blocks."""
        self._cores.work()
        under_way = self._runner.under_way() if self._scheduler.overlaps else []
        batch = self._scheduler.go_on(under_way) if under_way else self._scheduler.schedule()
        self._note(batch)
        self._swap.copy(*self._blocks.take_copies())
        counts = [item.num_tokens for item in batch]
        num_written = counts.count(1)
        num_prefilled = sum(counts) - num_written
        batch = self._speculator.propose(batch)
        following = self._scheduler.following(batch, self.model_config.max_model_len)
        started = self._now()
        with computing:
            tokens = self._runner.execute(batch, following) if following else self._runner.execute(batch)
        taken = self._now() - started
        self._pace.passed(num_prefilled, num_written, taken)
        self._speculator.passed(batch, taken)
        self._swap.passed(sum(item.num_tokens for item in batch), taken)
        outputs = self._update(batch, tokens)
        self.crash_page.stepped()
        self._rest_when_idle()
        return outputs

    def has_work(self) -> bool:
        """True if a step would compute something: reservations that were not joined are not work."""
        scheduler = self._scheduler
        return bool(scheduler.waiting or scheduler.running or self._blocks.lent)

    def stats(self) -> EngineStats:
        scheduler = self._scheduler
        queued = chain(scheduler.waiting, scheduler.running)
        uncomputed = (seq.num_prompt_tokens - seq.num_computed_tokens for seq in queued)
        return EngineStats(
            num_waiting=len(scheduler.waiting),
            num_running=len(scheduler.running),
            num_reserved=len(scheduler.reserved),
            free_blocks=self._pool.least_free,
            num_blocks=self._pool.num_blocks,
            queued_tokens=sum(tokens for tokens in uncomputed if tokens > 0),
            num_prefilled_tokens=self._num_computed - self._num_written,
            num_written_tokens=self._num_written,
            num_proposed_tokens=self._speculator.num_proposed,
            num_accepted_tokens=self._speculator.num_accepted,
            num_preempted=scheduler.num_preempted,
            num_swapped=scheduler.num_swapped,
            num_aborted=self._num_aborted,
            num_aborted_blocks=self._num_aborted_blocks,
            num_evicted_blocks=self._pool.num_evicted,
            likely_tokens=self._lengths.likely_left,
        )

    @property
    def num_suspects(self) -> int:
        """The number of sequences that may compute only alone; readable from any thread."""
        return len(self._scheduler.suspects)

    def request_ids(self) -> list[str]:
        """Returns the request ids of all sequences in the engine."""
        return list(self._live)

    def check_integrity(self) -> None:
        """Raises AssertionError naming a block or sequence that is not where it belongs."""
        self._scheduler.check_integrity()
        held = sum(map(len, (self._scheduler.waiting, self._scheduler.running, self._scheduler.reserved)))
        assert held == len(self._live), f"{held} sequences are scheduled, {len(self._live)} live"

    def take_block_events(self) -> list[BlockStored | BlockRemoved]:
        """Returns the blocks that the prefix cache gained and lost since the last call, removals first."""
        return self._pool.take_events()

    def _rest_when_idle(self) -> None:
        if not self.has_work():
            self._cores.rest()

    def _new_sequence(self, request: Request, total: int, speculative: Speculative | None) -> Sequence:
        """Checks a request and makes its sequence, of at most `total` tokens. `speculative` None takes the config's."""
        speculative = speculative or self._speculative
        self._check(request, total, speculative)
        self._num_arrived += 1
        seq = new_sequence(request, self._num_arrived, self.layout, speculative)
        if request.sampling.grammar:
            with self.crash_page.compiling(seq.choice_id):
                guide = self.grammars.start(request.sampling.grammar)
            seq.guide = NamedGuide(guide, seq, self.crash_page)
        return seq

    def _check(self, request: Request, total: int, speculative: Speculative) -> None:
        if request.request_id in self._live:
            raise ValueError(f"request_id: {request.request_id!r} is in the engine already")
        length, longest = len(request.token_ids), self.model_config.max_model_len
        if not 0 < length < longest:
            raise ValueError(f"token_ids: {length} tokens are not between 1 and max_model_len - 1 = {longest - 1}")
        self._check_token_ids("token_ids", request.token_ids)
        request.sampling.check()
        if request.sampling.max_tokens < 1:
            raise InvalidParameter("max_tokens", f"must be at least 1, got {request.sampling.max_tokens}")
        prior, most = request.num_prior_tokens, min(length, request.sampling.max_tokens)
        if not 0 <= prior < most:
            raise ValueError(f"num_prior_tokens: {prior} is not between 0 and {most - 1}")
        request.sampling.check_vocabulary(self.model_config.vocab_size)
        speculative.check(self._speculator.methods)
        needed, there_are = self._blocks.blocks_for(total), self._pool.num_blocks
        if needed > there_are:
            raise ValueError(f"token_ids: with max_tokens they need {needed} KV blocks, there are {there_are}")
        if request.lora is not None and (request.adapter is None or request.adapter.revision != request.lora.revision):
            raise ValueError(f"lora: the weights of {request.lora.name!r} are not in the request")

    def _check_token_ids(self, field: str, token_ids: list[int]) -> None:
        vocab_size = self.model_config.vocab_size
        if not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
            wrong = next(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)
            raise ValueError(f"{field}: {wrong} is outside the vocabulary of {vocab_size}")

    def _max_tokens(self, request: Request) -> int:
        """Returns the most tokens, prompt and answer together, that a request can reach."""
        longest = len(request.token_ids) - request.num_prior_tokens + request.sampling.max_tokens
        return min(longest, self.model_config.max_model_len)

    def _reserved(self, request_id: str) -> Sequence:
        seq = self._live.get(request_id)
        if seq is None or seq.status is not Status.RESERVED:
            raise ValueError(f"request_id: {request_id!r} holds no reservation")
        return seq

    def _update(self, batch: list[Scheduled], tokens: dict[str, list[SampledToken]]) -> list[SequenceOutput]:
        outputs = []
        for seq, num_tokens, _ in batch:
            output = self._advance(seq, num_tokens, tokens.get(seq.request_id, []))
            if output is not None:
                outputs.append(output)
        if self._scheduler.suspects or self._scheduler.apart:
            self._acquit([item.seq for item in batch])
        return outputs

    def _note(self, batch: list[Scheduled]) -> None:
        """Writes to the crash page which sequences compute from now on, and that a step begins."""
        page, suspects = self.crash_page, self._scheduler.suspects
        for seq in self._scheduler.take_moved():
            page.leave(seq.slot)
            runs = seq.status is Status.RUNNING and self._live.get(seq.request_id) is seq
            kind = SUSPECT if seq in suspects or self._scheduler.waits_apart(seq) else COMPUTING
            seq.slot = page.enter(seq.choice_id, seq.num_output_tokens, kind) if runs else NOBODY
        if not batch:
            return
        if batch[0].seq in suspects:
            page.stepping_alone(batch[0].seq.slot, batch[0].seq.num_output_tokens)
        else:
            page.stepping()

    def _acquit(self, computed: list[Sequence]) -> None:
        """Clears suspects that are past the token where another engine died, and ends the turns of begun sequences."""
        for seq in computed:
            if seq.apart_until and seq.num_output_tokens >= seq.apart_until:
                self._scheduler.apart.pop(seq, None)
                seq.apart_until = 0
            if seq in self._scheduler.suspects and seq.num_output_tokens >= seq.alone_until:
                del self._scheduler.suspects[seq]
                seq.alone_until = 0
                self.crash_page.acquit(seq.slot, seq.num_output_tokens)

    def _advance(self, seq: Sequence, num_tokens: int, tokens: list[SampledToken]) -> SequenceOutput | None:
        before, cached, known = len(seq.token_ids), seq.num_cached_tokens or 0, num_tokens - len(seq.proposed)
        index, is_prefill = before - seq.answer_start, before == seq.num_prompt_tokens
        self._num_computed += known
        if seq.error is not None:
            output = SequenceOutput(seq.request_id, index, [], None, cached, seq.error, finished=True)
        else:
            reason = self._append(seq, tokens)
            new = len(seq.token_ids) - before
            seq.num_computed_tokens += known + new - (new > 0)
            self._blocks.register(seq)
            if new != 1:
                self.crash_page.moved(seq.slot, seq.num_output_tokens)
            if not tokens:
                return None
            if is_prefill:
                self._blocks.register_tail(seq)
            else:
                self._num_computed += new - 1
                self._num_written += new if known == 1 else 0
            if seq.proposed or seq.speculative.method != "none":
                self._speculator.verified(seq, new)
                self._blocks.release_ahead(seq)
            finished = reason is not None or seq.prefill_only
            output = SequenceOutput(seq.request_id, index, tokens[:new], reason, cached, finished=finished)
            if is_prefill:
                output.prompt_logprobs = seq.prompt_logprobs
                output.embedding = seq.pool.vector() if seq.pool else []
            output.num_proposed_tokens, output.num_accepted_tokens = seq.num_proposed_tokens, seq.num_accepted_tokens
        if output.finished:
            self._remove(seq)
        return output

    def _append(self, seq: Sequence, tokens: list[SampledToken]) -> FinishReason | None:
        """Appends tokens up to the first that ends the sequence; returns the finish reason, or None if none does."""
        for token in tokens:
            seq.token_ids.append(token.token_id)
            reason = seq.check_stop(self.model_config.max_model_len)
            if reason is not None:
                return reason
        return None

    def _remove(self, seq: Sequence) -> None:
        if not seq.is_prefilling and not seq.prefill_only:
            self._lengths.ended(seq.num_output_tokens)
        self._scheduler.remove(seq)
        self.crash_page.leave(seq.slot)
        seq.slot = NOBODY
        del self._live[seq.request_id]
