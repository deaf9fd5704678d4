"""How many tokens to propose: as many as pay, by what steps cost and how often proposals were right.

    plain     a step of n sequences takes so long, by a line through what was measured
    ahead     so does one of n sequences and proposed tokens: of n + k rows
    passes    and so does proposing, for each token ahead of n sequences

A sequence whose proposals are right with probability p gains p^j tokens by its j-th one. Of all depths the one that
brings most tokens a second is taken, where it brings more than a plain step. What does not pay is tried again now and
then, for TRIES of the time. These are expectations, and may be wrong: what they may lose is bounded by the account.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

from tandem.engine.scheduling import Sequence
from tandem.engine.speculation.account import Account
from tandem.engine.step_cost import StepCost

MEMORY, LONG_MEMORY = 8.0, 64.0  # proposals that count, of one sequence and of all
PROOF = 4  # proposals, before which a proposer that has to read sequences first reads no more than one
TRIES = 0.01
MOST_FOR_A_TRY = 0.5  # of a plain step: tries wait for as much time, and hold a step's at most
HOPE = 0.6
FORGET_PLAIN = 0.9  # there are few plain steps where proposals pay


class Plan:
    """For one proposer. `hope`: how often any proposal is right. `reads_first`: see Proposer."""

    def __init__(self, *, reads_first: bool = False) -> None:
        self._reads_first = reads_first
        self._plain, self._ahead, self._passes = StepCost(FORGET_PLAIN), StepCost(), StepCost()
        self._account = Account()
        self._hope, self._seen = HOPE, MEMORY
        self._tries_s, self._token_s, self._turn = 0.0, 0.0, 0

    def counts(self, seqs: Items[Sequence], most: Items[int], num_rows: int) -> list[int]:
        """How many to propose for each of `seqs`, `most` at most, in a step that has `num_rows` without them."""
        if not self._account.is_open:
            return [0] * len(seqs)
        if self._reads_first and self._seen < MEMORY + PROOF:
            most = self._of_one_newcomer(seqs, most)
        return self._try_some(self._best(seqs, most, num_rows), self._cheap_to_try(seqs, most), num_rows)

    def proposed(self, num_seqs: int, num_ahead: int, seconds: float) -> None:
        """Proposing up to `num_ahead` tokens for so many took so long."""
        passes = max(1, num_ahead)
        if not self._passes.known:
            seconds = self._plain.at_most(num_seqs, seconds)
        pass_s = self._passes.at_most(num_seqs, seconds / passes)
        self._account.spend(passes * pass_s)
        self._passes.add(num_seqs, pass_s)

    def caught_up(self, seconds: float) -> None:
        """Proposing took so long because sequences were to be read first: later tries wait for as much time."""
        self._tries_s -= seconds
        self._account.spend_later(seconds)

    def passed_plain(self, num_seqs: int, seconds: float, steps: int = 1) -> None:
        """A step of so many sequences and nothing else took so long, as `steps` will."""
        self._plain.add(num_seqs, seconds)
        self._earn(num_seqs, steps)

    def passed(self, num_seqs: int, num_proposed: int, own: int, seconds: float) -> None:
        """A step of so many sequences and `num_proposed` tokens, of which `own` were this proposer's, took so long."""
        rows = num_seqs + num_proposed
        usual = self._ahead if self._ahead.known else self._plain
        seconds = usual.at_most(rows, seconds)
        self._ahead.add(rows, seconds)
        if self._plain.known:
            self._earn(num_seqs, 1)
            self._account.spend((seconds - self._plain.at(num_seqs)) * own / num_proposed)

    def passed_reading(self, own: int) -> None:
        """A step that also prefilled had so many proposed tokens, which took what they take elsewhere."""
        self._account.spend(own * self._ahead.line()[1])

    def verified(self, seq: Sequence, proposed: int, accepted: int) -> None:
        tried = accepted + (accepted < proposed)
        chance = self._hope if seq.chance is None else seq.chance
        seq.chance = (chance * MEMORY + accepted) / (MEMORY + tried)
        self._hope = (self._hope * self._seen + accepted) / (self._seen + tried)
        self._seen = min(self._seen + tried, LONG_MEMORY)
        self._account.gain(accepted * self._token_s)

    def _earn(self, num_seqs: int, steps: int) -> None:
        step_s = self._plain.at(num_seqs)
        self._token_s = step_s / num_seqs
        self._tries_s = min(self._tries_s + TRIES * step_s * steps, step_s)
        self._account.earn(step_s, steps)

    def _of_one_newcomer(self, seqs: Items[Sequence], most: Items[int]) -> list[int]:
        """None for those that were never tried, but for the first where nobody was."""
        new = [i for i, seq in enumerate(seqs) if seq.chance is None and most[i] > 0]
        if all(seq.chance is None for seq in seqs):
            del new[:1]
        return [0 if i in new else m for i, m in enumerate(most)]

    def _cheap_to_try(self, seqs: Items[Sequence], most: Items[int]) -> Items[int]:
        """Leaves out sequences that still have to be prefilled, as long as there are others."""
        if self._reads_first and any(seq.chance is not None and m > 0 for seq, m in zip(seqs, most, strict=True)):
            return [0 if seq.chance is None else m for seq, m in zip(seqs, most, strict=True)]
        return most

    def _best(self, seqs: Items[Sequence], most: Items[int], num_rows: int) -> list[int]:
        base, row_s = (self._ahead if self._ahead.known else self._plain).line()
        pass_s, token_s = self._passes.line()
        best, best_tokens, best_s = [0] * len(seqs), float(num_rows), self._plain.at(num_rows)
        counts, tokens, seconds = list(best), best_tokens, max(best_s, base + num_rows * row_s)
        chances = [self._hope if seq.chance is None else seq.chance for seq in seqs]
        for ahead in range(1, max(most, default=0) + 1):
            least = (row_s + token_s) * tokens
            pay = [
                i for i, p in enumerate(chances)
                if counts[i] == ahead - 1 and most[i] >= ahead and p**ahead * seconds >= least
            ]  # fmt: skip
            if not pay:
                break
            for i in pay:
                counts[i] = ahead
                tokens += chances[i] ** ahead
            seconds += pass_s + len(pay) * (row_s + token_s)
            if tokens * best_s >= best_tokens * seconds:
                best, best_tokens, best_s = list(counts), tokens, seconds
        return best

    def _try_some(self, counts: list[int], most: Items[int], num_rows: int) -> list[int]:
        line, plain_s = self._ahead if self._ahead.known else self._plain, self._plain.at(num_rows)
        price = self._passes.at(1) + max(line.line()[1], line.at(num_rows + 1) - plain_s)
        price = min(price, MOST_FOR_A_TRY * plain_s)  # a time measured in a bad moment is forgotten again
        for _ in counts:
            if self._tries_s < price:
                break
            self._turn = (self._turn + 1) % len(counts)
            if counts[self._turn] == 0 and most[self._turn] > 0:
                counts[self._turn] = 1
                self._tries_s -= price
        return counts
