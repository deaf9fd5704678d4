"""Forecasts of a work's turn, first token and end, from what others took.

    its turn      what goes before it, in tokens  /  what flows through the cluster: tokens inside / time spent inside;
                  not before that much of what is inside has been there as long as usual, for answers end in waves,
                  unless so much of it is of less urgent classes, which leave their blocks to it;
                  and not before the prompts among it are prefilled
    first token   the prompts that are inside, and its own  /  the rate that workers have measured, as much longer or
                  shorter as that was for others
    last token    as many more as others wrote of what they were allowed, at others' pace

Nothing is said before others have ended or workers have measured how fast they prefill, nor of work that has nobody
before it: whatever was measured of a bad time, an idle cluster takes work, and measures anew.
"""

from __future__ import annotations

from math import inf

from services.gateway.admission.capacity import Admitted
from services.gateway.admission.fair_queue import Work
from services.gateway.admission.priority import PriorityClass

WEIGHT = 1 / 16
# Seconds from a probe's first token until another probe whose deadline leaves no time to wait is admitted.
PROBE_AGAIN_S = 10.0
# Work hurries if its deadline leaves less than this multiple of the time it needs.
PATIENCE = 10
# Prompts prefilled sooner than this do not show how fast prefill is.
SHORT_S = 0.25


class Average:
    """The moving average of recent values, with their mean deviation."""

    def __init__(self) -> None:
        self.mean = self._deviation = 0.0
        self._count = 0

    def __bool__(self) -> bool:
        return self._count > 0

    @property
    def high(self) -> float:
        """Returns a bound that few values exceed."""
        return self.mean + self._deviation

    def add(self, value: float) -> None:
        self._count += 1
        weight = max(WEIGHT, 1 / self._count)
        self._deviation += weight * (abs(value - self.mean) * (self._count > 1) - self._deviation)
        self.mean += weight * (value - self.mean)


class Forecast:
    def __init__(self) -> None:
        self._inside_s, self._short_s, self._probe_first_s = Average(), Average(), Average()
        self._slower = Average()  # ratio of actual prefill times to those by workers' rates
        self._probed_at = -inf
        self._token_s, self._used = Average(), Average()

    def entered(self, work: Work, inside: Admitted, now: float) -> None:
        """Note that work was admitted."""
        work.entered_at = now
        work.line_s = inside.prefill_s(inside.prompts_before(work) + work.to_prefill)

    def prefilled(self, work: Work, now: float) -> None:
        """Note the first token of work."""
        work.first_at, first_s = now, now - work.entered_at
        if work.is_probe:
            self._probe_first_s.add(first_s)
            self._probed_at = now
        elif work.line_s > SHORT_S:
            self._slower.add(first_s / work.line_s)
        elif work.line_s:
            self._short_s.add(first_s)

    def ended(self, work: Work, now: float) -> None:
        if not work.new_tokens:
            return
        self._inside_s.add(now - work.entered_at)
        self._used.add(work.new_tokens / work.max_new_tokens)
        if work.new_tokens > 1:
            self._token_s.add((now - work.first_at) / (work.new_tokens - 1))

    def turn_s(self, tokens_ahead: int, to_prefill: float, inside: Admitted, kind: PriorityClass, now: float) -> float:
        """Returns the seconds until the turn of work of a class; 0 if unknown.

        `to_prefill`: part of the tokens ahead.
        """
        prefill_s = self._prefill_s(to_prefill, inside)
        if not self._inside_s or not inside.tokens:
            return prefill_s
        flow_s = max(prefill_s, tokens_ahead * self._inside_s.mean / inside.tokens)
        if tokens_ahead < inside.yielded_to(kind):
            return flow_s
        return max(flow_s, _makes_room(tokens_ahead, inside).entered_at + self._inside_s.high - now, 0.0)

    def each_s(self, work: Work, inside: Admitted) -> float:
        """Returns the seconds until there is room for another work like this one; 0 if unknown.

        It counts as large as the mean admitted work at least, as its prompt may not be read yet."""
        if not len(inside):
            return 0.0
        cost, prompt = max(work.cost, inside.tokens / len(inside)), max(work.to_prefill, inside.mean_to_prefill)
        return max(cost * self._inside_s.mean / inside.tokens, self._prefill_s(prompt, inside))

    def first_token_s(self, turn_s: float, work: Work, inside: Admitted) -> float:
        prompts = inside.prompts_before(work) + work.to_prefill
        return turn_s + max(self._short_s.high, self._prefill_s(prompts, inside))

    def hurries(self, work: Work, inside: Admitted, now: float) -> bool:
        if work.end_by == inf:
            return False
        return work.end_by - now < PATIENCE * self.last_token_s(0.0, work, inside)

    def is_cut_as_probe(self, work: Work, now: float) -> bool:
        """True if the work would end too late, should it wait for blocks as long as other probes did."""
        if now > self._probed_at + PROBE_AGAIN_S:
            return False
        return self._probe_first_s.high + self._writing_s(work) > work.end_by - now

    def start_by(self, work: Work, inside: Admitted, now: float) -> float:
        """Returns the latest turn that keeps the work's target and deadline, but not before `now`."""
        target = inf if work.ttft_s is None else now + work.ttft_s - self.first_token_s(0.0, work, inside)
        return max(min(target, work.end_by - self.last_token_s(0.0, work, inside)), now)

    def last_token_s(self, turn_s: float, work: Work, inside: Admitted) -> float:
        return self.first_token_s(turn_s, work, inside) + self._writing_s(work)

    def _prefill_s(self, tokens: float, inside: Admitted) -> float:
        return inside.prefill_s(tokens) * (self._slower.mean if self._slower else 1.0)

    def _writing_s(self, work: Work) -> float:
        return self._used.mean * work.max_new_tokens * self._token_s.mean


def _makes_room(tokens: int, inside: Admitted) -> Work:
    """Returns the last work that must leave, oldest first, before work after so many tokens has room."""
    if tokens >= inside.tokens:
        return next(reversed(inside))
    found, left = next(iter(inside)), 0
    for work in inside:
        if left > tokens:
            break
        found, left = work, left + work.cost
    return found
