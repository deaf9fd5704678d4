"""A step's proposals: for each decoding sequence that wants them, as many as pay and as there is room for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import groupby

from tandem.engine.scheduler import Scheduled, Scheduler
from tandem.engine.sequence import Sequence
from tandem.engine.speculation.plan import Plan
from tandem.engine.speculation.proposer import Proposer, Wanted

REST = 7  # steps without a thought of proposing, after one where nothing paid


class Speculator:
    """Proposes by `proposers`, by method. `now` says the time in seconds, from any beginning."""

    def __init__(
        self, proposers: Mapping[str, Proposer], scheduler: Scheduler, max_model_len: int, now: Callable[[], float]
    ) -> None:
        self._proposers, self._scheduler, self._max_model_len, self._now = proposers, scheduler, max_model_len, now
        self._plans = {method: Plan() for method in proposers}
        self._resting = 0
        self.num_proposed = self.num_accepted = 0

    @property
    def methods(self) -> tuple[str, ...]:
        return ("none", *self._proposers)

    def propose(self, batch: list[Scheduled]) -> list[Scheduled]:
        """The batch with the proposed tokens of its sequences."""
        if self._resting:
            self._resting -= 1
            return batch
        wanting = [item.seq for item in batch if _decodes(item) and item.seq.speculative.method in self._proposers]
        if not wanting:
            return batch
        room = left = self._scheduler.max_num_batched_tokens - sum(item.num_tokens for item in batch)
        for method, seqs in groupby(sorted(wanting, key=_method), key=_method):
            left -= self._propose_by(method, list(seqs), len(batch), left)
        if left == room:
            self._resting = REST
            return batch
        return [item._replace(num_tokens=item.num_tokens + len(item.seq.proposed)) for item in batch]

    def verified(self, seq: Sequence, num_drawn: int) -> None:
        """`num_drawn` tokens came of the step, and are the sequence's last: one more than were accepted."""
        if proposed := len(seq.proposed):
            seq.num_drafted_tokens = min(seq.num_drafted_tokens, seq.num_tokens - 1)
            seq.num_proposed_tokens += proposed
            seq.num_accepted_tokens += num_drawn - 1
            self.num_proposed += proposed
            self.num_accepted += num_drawn - 1
            self._plans[seq.speculative.method].verified(seq, proposed, num_drawn - 1)
            del seq.proposed[:]

    def passed(self, batch: list[Scheduled], seconds: float) -> None:
        """A step of `batch` took so long, without proposing."""
        if self._resting in (0, REST) and batch and all(_decodes(item) or item.seq.proposed for item in batch):
            rows = sum(item.num_tokens for item in batch)
            for plan in self._plans.values():
                plan.passed(rows, seconds, 1 + self._resting)

    def _propose_by(self, method: str, seqs: list[Sequence], num_rows: int, room: int) -> int:
        """Returns for how many tokens there was reason and room."""
        plan, started = self._plans[method], self._now()
        most = [min(seq.speculative.num_tokens, seq.num_tokens_to_come(self._max_model_len) - 1) for seq in seqs]
        wanted = []
        for seq, count in zip(seqs, plan.counts(seqs, most, num_rows), strict=True):
            fit = self._scheduler.extend(seq, min(count, room))
            if fit:
                wanted.append(Wanted(seq, fit))
                room -= fit
        if not wanted:
            return 0
        usual = self._proposers[method].propose(wanted)
        if usual:
            plan.proposed(sum(len(seq.proposed) for seq, _ in wanted), self._now() - started)
        return sum(most for _, most in wanted)


def _decodes(item: Scheduled) -> bool:
    return item.num_tokens == 1 and item.samples and not item.seq.is_reading


def _method(seq: Sequence) -> str:
    return seq.speculative.method
