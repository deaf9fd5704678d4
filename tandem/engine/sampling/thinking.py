"""The budget of thoughts: once it is used up, only the mark that ends the thoughts may come next.

The forced token follows from the answer's tokens alone, so an answer that resumes on another worker stays the same.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Items

from tandem.engine.scheduling import Row

SPACE = 1  # the most tokens of white space before the mark that begins thoughts


def end_of_thoughts(seq: Row) -> int | None:
    """Returns the token that must come next to end the thoughts; None if any token may."""
    budget, end = seq.sampling.thinking_token_budget, seq.sampling.thinking_end_token_ids
    if budget is None or not end or seq.num_output_tokens < budget:
        return None
    answer = seq.token_ids[seq.answer_start :]
    start = _start(answer, seq.sampling.thinking_begin_token_ids)
    if start is None or len(answer) - start < budget or _find(answer, end, start) is not None:
        return None
    longest = min(len(end) - 1, len(answer) - start)
    written = next((n for n in range(longest, 0, -1) if tuple(answer[-n:]) == end[:n]), 0)
    return end[written]


def _start(answer: array[int], begin: Items[int]) -> int | None:
    """Returns the index at which the thoughts begin; None if the answer has none."""
    if not begin:
        return 0
    found = _find(answer[: SPACE + len(begin)], begin, 0)
    return None if found is None else found + len(begin)


def _find(answer: array[int], mark: Items[int], start: int) -> int | None:
    while True:
        try:
            start = answer.index(mark[0], start)
        except ValueError:
            return None
        if tuple(answer[start : start + len(mark)]) == tuple(mark):
            return start
        start += 1
