"""The number of tokens to propose: as many as pay, by the measured cost of steps and share of right proposals.

    plain     the seconds of a step of n sequences: a line fitted to measured steps
    ahead     the seconds of a step of n sequences and k proposed tokens: of n + k rows
    passes    the seconds of proposing one token ahead for n sequences

A sequence whose proposals are right with probability p gains p^j expected tokens by its j-th proposal. The depth with
the most tokens a second is taken if it beats a plain step. Proposals that do not pay are tried again now and then, for
the share TRIES of the time. These expectations may be wrong; the account bounds the time they may lose.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

from tandem.engine.scheduling import Sequence
from tandem.engine.speculation.account import Account
from tandem.engine.step_cost import StepCost

MEMORY, LONG_MEMORY = 8.0, 64.0  # the numbers of recent proposals that count: of one sequence, of all
# A draft model prefills at most one new sequence until this many of its proposals have been judged.
PROOF = 4
TRIES = 0.01
MOST_FOR_A_TRY = 0.5  # the highest price of a try, as a share of a plain step's seconds
HOPE = 0.6
FORGET_PLAIN = 0.9  # lower than FORGET, because few steps are plain where proposals pay


class Plan:
    """The plan of one proposer. `reads_first`: see Proposer."""

    def __init__(self, *, reads_first: bool = False) -> None:
        self._reads_first = reads_first
        self._plain, self._ahead, self._passes = StepCost(FORGET_PLAIN), StepCost(), StepCost()
        self._account = Account()
        self._hope, self._seen = HOPE, MEMORY
        self._tries_s, self._token_s, self._turn = 0.0, 0.0, 0

    def counts(self, seqs: Items[Sequence], most: Items[int], num_rows: int) -> list[int]:
        """Returns how many tokens to propose for each of `seqs`, at most `most`, in a step of `num_rows` other rows."""
        if not self._account.is_open:
            return [0] * len(seqs)
        if self._reads_first and self._seen < MEMORY + PROOF:
            most = self._of_one_newcomer(seqs, most)
        return self._try_some(self._best(seqs, most, num_rows), self._cheap_to_try(seqs, most), num_rows)

    def proposed(self, num_seqs: int, num_ahead: int, seconds: float) -> None:
        """Records that proposing up to `num_ahead` tokens for `num_seqs` sequences took `seconds`."""
        passes = max(1, num_ahead)
        if not self._passes.known:
            seconds = self._plain.at_most(num_seqs, seconds)
        pass_s = self._passes.at_most(num_seqs, seconds / passes)
        self._account.spend(passes * pass_s)
        self._passes.add(num_seqs, pass_s)

    def caught_up(self, seconds: float) -> None:
        """Records `seconds` of proposing in which the proposer read sequences first; later tries wait for that time."""
        self._tries_s -= seconds
        self._account.spend_later(seconds)

    def passed_plain(self, num_seqs: int, seconds: float, steps: int = 1) -> None:
        """Records a plain step of `num_seqs` sequences that took `seconds`; it stands for `steps` such steps."""
        self._plain.add(num_seqs, seconds)
        self._earn(num_seqs, steps)

    def passed(self, num_seqs: int, num_proposed: int, own: int, seconds: float) -> None:
        """Records a step of `num_seqs` sequences and `num_proposed` proposed tokens, `own` of them this proposer's."""
        rows = num_seqs + num_proposed
        usual = self._ahead if self._ahead.known else self._plain
        seconds = usual.at_most(rows, seconds)
        self._ahead.add(rows, seconds)
        if self._plain.known:
            self._earn(num_seqs, 1)
            self._account.spend((seconds - self._plain.at(num_seqs)) * own / num_proposed)

    def passed_reading(self, own: int) -> None:
        """Records `own` proposed tokens in a step that also prefilled; they are charged their usual cost."""
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
        """Returns `most` with 0 for sequences never tried, except for the first one if none was tried yet."""
        new = [i for i, seq in enumerate(seqs) if seq.chance is None and most[i] > 0]
        if all(seq.chance is None for seq in seqs):
            del new[:1]
        return [0 if i in new else m for i, m in enumerate(most)]

    def _cheap_to_try(self, seqs: Items[Sequence], most: Items[int]) -> Items[int]:
        """Returns `most` with 0 for sequences that the proposer has not read yet, unless there are no others."""
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
        price = min(price, MOST_FOR_A_TRY * plain_s)  # so one slow measurement does not prevent tries forever
        for _ in counts:
            if self._tries_s < price:
                break
            self._turn = (self._turn + 1) % len(counts)
            if counts[self._turn] == 0 and most[self._turn] > 0:
                counts[self._turn] = 1
                self._tries_s -= price
        return counts
