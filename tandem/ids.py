"""Ids that nobody can guess."""

from __future__ import annotations

import os
from collections import deque

DIGITS = 32
AT_ONCE = 256


class RandomIds:
    """Makes ids of 32 hexadecimal digits each. Any thread may call it.

    The system is asked for the randomness of many at once: to ask it lets other threads run, who may take their time.
    """

    def __init__(self) -> None:
        self._left: deque[str] = deque()

    def __call__(self) -> str:
        while True:
            try:
                return self._left.pop()
            except IndexError:  # another thread may take them before this one
                digits = os.urandom(AT_ONCE * DIGITS // 2).hex()
                self._left.extend(digits[at : at + DIGITS] for at in range(0, len(digits), DIGITS))
