"""How many prompt tokens a step may read beside decodes that have a target for the time between their tokens."""

from __future__ import annotations

# Steps differ: of the target, so much is planned with.
PLANNED = 0.9
# Where decodes alone take all of the target, prompts still come on by so many tokens a step.
LEAST_CHUNK = 16
# Fewer prompt tokens say little about how long one takes.
LEAST_READ = 16
WEIGHT = 1 / 8


class Pace:
    """Knows how long steps took: `passed` after each. No chunk is larger than `most`."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._decode_s = self._token_s = 0.0

    def passed(self, num_read: int, num_written: int, seconds: float) -> None:
        """A step has read so many prompt tokens and decoded so many sequences."""
        if not num_read:
            self._decode_s = _average(self._decode_s, seconds)
        elif num_read >= LEAST_READ and (self._decode_s or not num_written):
            reading = seconds - self._decode_s * (num_written > 0)
            self._token_s = _average(self._token_s, max(reading, 0.0) / num_read)

    def chunk(self, target_s: float, unmeasured: int, expects: bool = False) -> int:
        """With which a step takes no longer than `target_s`; `unmeasured` before it is known how long steps take.

        `expects`: with which that holds of it and the next one together, which reads no more than LEAST_CHUNK. For a
        sequence that joins has its first token already, and waits for the step under way before its own.
        """
        if not self._decode_s or not self._token_s:
            return min(unmeasured, self._most)
        fits = (PLANNED * target_s - self._decode_s) / self._token_s
        if expects:
            fits -= self._decode_s / self._token_s + LEAST_CHUNK
        return int(min(max(fits, LEAST_CHUNK), self._most))


def _average(known: float, new: float) -> float:
    return known + WEIGHT * (new - known) if known else new
