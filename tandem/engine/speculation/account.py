"""A bound on the time that proposing may lose, whatever the plan expects: an account of seconds, relative to plain
decoding.

    earned   the share LOSS of the seconds that plain steps would take
    spent    the seconds of proposing, and those by which a step exceeds a plain step of as many sequences
    gained   for each accepted token, the seconds of a plain step divided by its sequences

Nothing is proposed while the account is overdrawn. It begins with the seconds of MOST plain steps and never holds more.
So where plain decoding would take S seconds, speculation takes at most S + LOSS * S + MOST steps + one step whose
proposals were refused: 5 % more at most from 200 steps on, and LOSS in the long run. The time in which a draft model
prefills a prompt is spent little by little, over about SPREAD steps.
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
        """True if tokens may be proposed: a plain step has been measured, and the account is not overdrawn."""
        return self._begun and self._held_s >= 0

    def earn(self, step_s: float, steps: int) -> None:
        """Credits `steps` steps, each of which would have taken `step_s` seconds as a plain step."""
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
