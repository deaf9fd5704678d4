"""The number of prompt tokens that a step computes beside decodes with a target for the time between tokens.

A target is in reach if a step of decodes alone takes less time than the target: prompts get the rest. A target out of
reach is ignored: prompts get as much time of a step as decodes take, or as much as the oldest prompt has waited, up to
MOST_STEPS times the decodes' time. So few steps compute little, and a prompt that has just arrived makes no long pause.

The time of a prompt token is measured. On a GPU a step of few tokens takes as long as reading the weights: it gives
only an upper bound of a token's time, and only a longer step measures that time.
"""

from __future__ import annotations

from collections.abc import Collection

from tandem.engine.step_cost import SLOW

# The share of the target that a step is planned to take, because steps vary. If decodes take nearly all of that share,
# prompts get the remaining tenth of the target.
PLANNED = 0.9
# The fewest prompt tokens in a step: fewer tokens take about as long.
LEAST_CHUNK = 16
# If the target is out of reach, prompts take at most this many times as long as the decodes of the same step.
MOST_STEPS = 10
# Seconds of prompt tokens in a step beside decodes without a target, where `usual` sets no number of tokens.
PAUSE_S = 0.1
# A step of prompts alone that takes no longer than this many steps of decodes spends most of its time reading weights.
MOSTLY_WEIGHTS = 2
WEIGHT = 1 / 8


class Pace:
    """Chooses the prompt tokens of a step from the measured times of earlier steps; call `passed` after each step.

    usual: prompt tokens beside decodes without a target, and while step times are unknown; None: as many as take
    PAUSE_S. No chunk is larger than `most`.
    """

    def __init__(self, most: int, usual: int | None) -> None:
        self._most, self._usual = most, usual
        self._decode_s = self._token_s = 0.0
        self.stepped_s = 0.0  # seconds of all steps so far: the clock for how long prompts wait

    def passed(self, num_prefilled: int, num_written: int, seconds: float) -> None:
        """Records a step that computed `num_prefilled` prompt tokens and decoded `num_written` sequences."""
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
        """Corrects both estimates by a mixed step's unexpected time, the larger part more.

        So slower decodes are noticed even if every step has prompts.
        """
        expected = decode_s + prompts_s
        change = WEIGHT * (min(seconds, SLOW * expected) - expected) / (decode_s**2 + prompts_s**2)
        self._decode_s += change * decode_s**2
        self._token_s += change * prompts_s**2 / num_prefilled

    def chunk(self, targets: Collection[float], *, joins: bool, joined: bool, waited_s: float) -> int:
        """Returns the prompt tokens of a step beside decodes with `targets`. `waited_s`: the oldest prompt's wait.

        A sequence that joins has its first token already and waits for the step under way before its first own step.
        If one may join (`joins`), this step and the next together keep the target if they can. In the next step, once
        it has `joined`, prompts get the fewest tokens.
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
