"""How many tokens to propose: as many as pay, by what steps cost and how often proposals were right.

A step of n rows takes base + n * each seconds, by a line through what was measured. A sequence whose proposals are
right with probability p gains p^j tokens by its j-th one, which is proposed where the seconds that it takes would bring
less if spent on steps without it. Whatever does not pay is tried again now and then, for a hundredth of the time.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

from tandem.engine.sequence import Sequence
from tandem.engine.step_cost import FORGET, StepCost

MEMORY, LONG_MEMORY = 8.0, 64.0  # proposals that count, of one sequence and of all
TRIES = 0.01
HOPE = 0.6


class Plan:
    """For one proposer. `hope`: how often any proposal is right."""

    def __init__(self) -> None:
        self.cost = StepCost()
        self._hope, self._propose_s, self._tries_s, self._turn = HOPE, 0.0, 0.0, 0

    def counts(self, seqs: Items[Sequence], most: Items[int], num_rows: int) -> list[int]:
        """How many to propose for each of `seqs`, `most` at most, in a step that has `num_rows` without them."""
        base, each = self.cost.line()
        price, tokens, seconds = each + self._propose_s, float(num_rows), base + num_rows * each
        chances = [self._hope if seq.chance is None else seq.chance for seq in seqs]
        counts = [0] * len(seqs)
        for ahead in range(1, max(most, default=0) + 1):
            least = price * tokens / seconds if seconds else 0.0
            pay = [i for i, p in enumerate(chances) if counts[i] == ahead - 1 and most[i] >= ahead and p**ahead > least]
            for i in pay:
                counts[i] = ahead
                tokens, seconds = tokens + chances[i] ** ahead, seconds + price
            if not pay:
                break
        return self._try_some(counts, most, price)

    def proposed(self, num_tokens: int, seconds: float) -> None:
        """Proposing so many took so long."""
        self._propose_s += (seconds / max(1, num_tokens) - self._propose_s) * (1 - FORGET)

    def caught_up(self, seconds: float) -> None:
        """Proposing took so long because sequences were to be read first: later tries wait for as much time."""
        self._tries_s -= seconds

    def verified(self, seq: Sequence, proposed: int, accepted: int) -> None:
        tried = accepted + (accepted < proposed)
        chance = self._hope if seq.chance is None else seq.chance
        seq.chance = (chance * MEMORY + accepted) / (MEMORY + tried)
        self._hope = (self._hope * LONG_MEMORY + accepted) / (LONG_MEMORY + tried)

    def passed(self, rows: int, seconds: float, steps: int = 1) -> None:
        """A step of so many rows and no prompt took so long, as `steps` will."""
        self.cost.add(rows, seconds)
        self._tries_s = min(self._tries_s + TRIES * seconds * steps, seconds)

    def _try_some(self, counts: list[int], most: Items[int], price: float) -> list[int]:
        for _ in counts:
            if self._tries_s < price:
                break
            self._turn = (self._turn + 1) % len(counts)
            if counts[self._turn] == 0 and most[self._turn] > 0:
                counts[self._turn] = 1
                self._tries_s -= price
        return counts
