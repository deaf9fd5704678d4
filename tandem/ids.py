"""Ids that cannot be guessed."""

from __future__ import annotations

import os
from collections import deque

DIGITS = 32
AT_ONCE = 256


class RandomIds:
    """Makes ids of 32 hexadecimal digits each. Any thread may call it.

    It gets the randomness of many ids from the system in one call, as each call releases the GIL and may wait for
    others.
    """

    def __init__(self) -> None:
        self._left: deque[str] = deque()

    def __call__(self) -> str:
        while True:
            try:
                return self._left.pop()
            except IndexError:  # another thread may have taken the last id
                digits = os.urandom(AT_ONCE * DIGITS // 2).hex()
                self._left.extend(digits[at : at + DIGITS] for at in range(0, len(digits), DIGITS))
