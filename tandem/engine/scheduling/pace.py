"""How many prompt tokens a step computes beside decodes that have a target for the time between their tokens.

A target is in reach where decodes leave something of it: prompts get that. Out of reach it holds nobody back: prompts
get as much of a step as decodes do, or as much as the oldest of them has waited, up to MOST_STEPS times as much as
decodes. So little time goes to steps that compute little, and a prompt that has just come makes no long pause.

How long a prompt's tokens take is measured. On a device a step of few takes as long as its weights take to be read: it
says how long they take at most, and only a longer one how long they do.
"""

from __future__ import annotations

from collections.abc import Collection

from tandem.engine.step_cost import SLOW

# The share of the target that is planned with, for steps differ. Prompts get the rest where decodes take nearly all.
PLANNED = 0.9
# The least tokens of prompts in a step: fewer take about as long.
LEAST_CHUNK = 16
# Out of the target's reach, prompts take at most this many times as long as the decodes of the same step.
MOST_STEPS = 10
# Of prompts beside decodes that have no target, where nobody has said how many tokens that is.
PAUSE_S = 0.1
# A step of prompts that is no longer than so many of decodes is mostly the reading of weights.
MOSTLY_WEIGHTS = 2
WEIGHT = 1 / 8


class Pace:
    """Knows how long steps took: `passed` after each.

    usual: tokens of prompts beside decodes without a target, and before it is known how long steps take; None: as many
    as take PAUSE_S. No chunk is larger than `most`.
    """

    def __init__(self, most: int, usual: int | None) -> None:
        self._most, self._usual = most, usual
        self._decode_s = self._token_s = 0.0
        self.stepped_s = 0.0  # by all steps: the clock for how long prompts wait

    def passed(self, num_prefilled: int, num_written: int, seconds: float) -> None:
        """A step has computed so many prompt tokens and decoded so many sequences."""
        self.stepped_s += seconds
        decode_s, prompts_s = self._decode_s if num_written else 0.0, self._token_s * num_prefilled
        if num_written and not num_prefilled:
            self._decode_s = _average(self._decode_s, seconds)
        elif decode_s and prompts_s:
            self._correct(decode_s, prompts_s, num_prefilled, seconds)
        elif num_prefilled >= LEAST_CHUNK and (decode_s or not num_written):
            each = max(seconds - decode_s, 0.0) / num_prefilled
            if not num_written and self._token_s and seconds <= MOSTLY_WEIGHTS * self._decode_s:
                each = min(each, self._token_s)
            self._token_s = _average(self._token_s, each)

    def _correct(self, decode_s: float, prompts_s: float, num_prefilled: int, seconds: float) -> None:
        """Put what was not expected of a step of both down to the larger part, mostly. So it is seen that decodes
        have become slower also where there are prompts in every step."""
        expected = decode_s + prompts_s
        change = WEIGHT * (min(seconds, SLOW * expected) - expected) / (decode_s**2 + prompts_s**2)
        self._decode_s += change * decode_s**2
        self._token_s += change * prompts_s**2 / num_prefilled

    def chunk(self, targets: Collection[float], *, joins: bool, joined: bool, waited_s: float) -> int:
        """Beside decodes with these targets. `waited_s`: for how long the oldest prompt has waited.

        A sequence that joins has its first token already, and waits for the step under way before its own. Where
        one `joins`, this step and the next one together keep the target if they can: the next, to which it has then
        `joined`, computes the least of prompts.
        """
        usual = self._without_target()
        if not targets or not self._decode_s or not self._token_s:
            return usual
        return min(self._beside(target_s, usual, joins, joined, waited_s) for target_s in targets)

    def _without_target(self) -> int:
        if self._usual is not None:
            return min(self._usual, self._most)
        return self._chunk(PAUSE_S, self._most) if self._token_s else self._most

    def _beside(self, target_s: float, usual: int, joins: bool, joined: bool, waited_s: float) -> int:
        left_s = PLANNED * target_s - self._decode_s
        if left_s < 0:
            return self._chunk(min(max(self._decode_s, waited_s), MOST_STEPS * self._decode_s), usual)
        least_s = max(LEAST_CHUNK * self._token_s, (1 - PLANNED) * target_s)
        least_step_s = self._decode_s + least_s
        if 2 * least_step_s <= target_s:
            left_s = least_s if joined else left_s - least_step_s * joins
        return self._chunk(max(left_s, least_s), self._most)

    def _chunk(self, seconds: float, most: int) -> int:
        return min(max(int(seconds / self._token_s), LEAST_CHUNK), most)


def _average(known: float, new: float) -> float:
    return known + WEIGHT * (min(new, SLOW * known) - known) if known else new
