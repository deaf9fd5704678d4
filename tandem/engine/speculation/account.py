"""A bound on what proposing may lose, whatever is expected of it: an account of seconds, measured beside plain
decoding.

    earned   LOSS of the seconds that plain steps would take
    spent    what proposing takes, and what a step takes longer than a plain one of as many sequences
    gained   by each accepted token, a plain step's seconds for one

Nothing is proposed while it is overdrawn. It begins with MOST plain steps, and never holds more: so where plain
decoding would take S seconds, speculation takes no longer than S + LOSS * S + MOST steps + one step that disappointed:
5 % at most from 200 steps on, and in the long run LOSS. What a draft prefills of a prompt before it proposes is spent
little by little, over about SPREAD steps.
"""

from __future__ import annotations

LOSS = 0.03
MOST = 3.0
SPREAD = 256


class Account:
    def __init__(self) -> None:
        self._held_s = self._unpaid_s = self._most_s = 0.0
        self._begun = False

    @property
    def is_open(self) -> bool:
        """True if anything may be proposed: not before a plain step has been seen."""
        return self._begun and self._held_s >= 0

    def earn(self, step_s: float, steps: int) -> None:
        """As many plain steps, had they been plain, would take `step_s` each."""
        self._most_s = MOST * step_s
        if not self._begun:
            self._begun, self._held_s = True, self._most_s
        paid = min(1.0, steps / SPREAD) * self._unpaid_s
        self._unpaid_s -= paid
        self.gain(LOSS * step_s * steps - paid)

    def gain(self, seconds: float) -> None:
        self._held_s = min(self._held_s + seconds, self._most_s)

    def spend(self, seconds: float) -> None:
        self.gain(-seconds)

    def spend_later(self, seconds: float) -> None:
        self._unpaid_s += seconds
