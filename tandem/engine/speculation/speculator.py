"""A step's proposals: for each decoding sequence that wants them, as many tokens as pay and fit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from itertools import groupby
from math import inf

from tandem.engine.scheduling import Scheduled, Scheduler, Sequence
from tandem.engine.speculation.plan import Plan
from tandem.engine.speculation.proposer import Proposer, Wanted

MOST_FORCED = 64  # the most forced tokens of one answer in a step
REST = 7  # the number of steps without proposals after a step in which none was worth its cost
PLAIN_EVERY = 50  # the first step and then one in this many goes without proposals, to measure plain steps


class Speculator:
    """Adds proposals to steps. `proposers` maps methods to proposers; `now` returns seconds of any monotonic clock."""

    def __init__(
        self, proposers: Mapping[str, Proposer], scheduler: Scheduler, max_model_len: int, now: Callable[[], float],
        *, jump_forward: bool,
    ) -> None:  # fmt: skip
        self._proposers, self._scheduler, self._max_model_len, self._now = proposers, scheduler, max_model_len, now
        self._plans = {method: Plan(reads_first=proposer.reads_first) for method, proposer in proposers.items()}
        self._jump_forward = jump_forward
        self._forced: set[str] = set()
        # Tokens proposed, by method; methods wanted in this step.
        self._guessed, self._wanted = Counter[str](), set[str]()
        self._resting = 0
        self._since_plain = inf  # inf: no plain step has been measured
        self.num_proposed = self.num_accepted = 0

    @property
    def methods(self) -> tuple[str, ...]:
        return ("none", *self._proposers)

    def propose(self, batch: list[Scheduled]) -> list[Scheduled]:
        """Returns the batch with proposed tokens added to its sequences' chunks."""
        self._forced.clear()
        self._guessed.clear()
        guesses = self._may_guess(batch)
        guides = self._jump_forward and any(item.seq.guide is not None for item in batch)
        if not guesses and not guides:
            return batch
        decoding = [item.seq for item in batch if _decodes(item)]
        room = self._scheduler.max_num_batched_tokens - sum(item.num_tokens for item in batch)
        for seq in decoding if guides else ():
            room -= self._force(seq, room) if seq.guide is not None else 0
        if guesses:
            self._guess([seq for seq in decoding if seq.request_id not in self._forced], len(batch), room)
        if not self._guessed and not self._forced:
            return batch
        return [item._replace(num_tokens=item.num_tokens + len(item.seq.proposed)) for item in batch]

    def verified(self, seq: Sequence, num_drawn: int) -> None:
        """Records the step's outcome: `num_drawn` new tokens, one more than proposals were accepted."""
        if proposed := len(seq.proposed):
            seq.num_drafted_tokens = min(seq.num_drafted_tokens, seq.num_tokens - 1)
            seq.num_proposed_tokens += proposed
            seq.num_accepted_tokens += num_drawn - 1
            self.num_proposed += proposed
            self.num_accepted += num_drawn - 1
            if seq.request_id not in self._forced:
                self._plans[seq.speculative.method].verified(seq, proposed, num_drawn - 1)
            del seq.proposed[:]

    def passed(self, batch: list[Scheduled], seconds: float) -> None:
        """Records that the step of `batch` took `seconds`, not counting the time of proposing."""
        if not self._guessed and not self._forced:
            if self._wanted and self._resting in (0, REST) and batch and all(map(_decodes, batch)):
                self._since_plain = 0
                for method in self._wanted:
                    self._plans[method].passed_plain(len(batch), seconds, 1 + self._resting)
            return
        decodes = all(_decodes(item) or item.seq.proposed for item in batch)
        self._since_plain += bool(self._guessed)
        num_proposed = sum(len(item.seq.proposed) for item in batch)
        for method in self._wanted:
            if decodes:
                self._plans[method].passed(len(batch), num_proposed, self._guessed[method], seconds)
            else:
                self._plans[method].passed_reading(self._guessed[method])

    def _may_guess(self, batch: list[Scheduled]) -> bool:
        if self._resting:
            self._resting -= 1
            return False
        if self._proposers:
            self._wanted = {item.seq.speculative.method for item in batch} & self._proposers.keys()
        # A step that prefills does not count as plain, so proposals do not pause for it.
        seen = PLAIN_EVERY if all(map(_decodes, batch)) else inf
        return bool(self._wanted) and self._since_plain < seen

    def _force(self, seq: Sequence, room: int) -> int:
        """Proposes the tokens that the sequence's grammar forces; returns how many."""
        assert seq.guide is not None
        if seq.guide.follow(seq.token_ids[seq.answer_start :]):
            return 0
        most = min(MOST_FORCED, room, seq.num_tokens_to_come(self._max_model_len) - 1)
        forced = seq.guide.forced()[: max(0, most)]
        fit = self._scheduler.blocks.extend(seq, len(forced))
        if fit:
            seq.proposed.extend(forced[:fit])
            self._forced.add(seq.request_id)
        return fit

    def _guess(self, seqs: list[Sequence], num_rows: int, room: int) -> None:
        """Has each method's proposer propose for the sequences that want it."""
        wanting = [seq for seq in seqs if seq.speculative.method in self._wanted]
        left = room
        for method, alike in groupby(sorted(wanting, key=_method), key=_method):
            left -= self._propose_by(method, list(alike), num_rows, left)
        if wanting and left == room:
            self._resting = REST

    def _propose_by(self, method: str, seqs: list[Sequence], num_rows: int, room: int) -> int:
        """Has a proposer propose for `seqs`; returns how many tokens the plan and the blocks allowed."""
        plan, started = self._plans[method], self._now()
        most = [min(seq.speculative.num_tokens, seq.num_tokens_to_come(self._max_model_len) - 1) for seq in seqs]
        wanted = []
        for seq, count in zip(seqs, plan.counts(seqs, most, num_rows), strict=True):
            fit = self._scheduler.blocks.extend(seq, min(count, room))
            if fit:
                wanted.append(Wanted(seq, fit))
                room -= fit
        if not wanted:
            return 0
        usual = self._proposers[method].propose(wanted)
        seconds = self._now() - started
        if usual:
            plan.proposed(len(wanted), max(len(seq.proposed) for seq, _ in wanted), seconds)
        else:
            plan.caught_up(seconds)
        if proposed := sum(len(seq.proposed) for seq, _ in wanted):
            self._guessed[method] = proposed
        return sum(most for _, most in wanted)


def _decodes(item: Scheduled) -> bool:
    return item.num_tokens == 1 and item.samples and not item.seq.is_prefilling


def _method(seq: Sequence) -> str:
    return seq.speculative.method
