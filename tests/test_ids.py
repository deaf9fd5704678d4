"""Ids that nobody can guess, from many threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tandem.ids import AT_ONCE, DIGITS, RandomIds

pytestmark = pytest.mark.fast


def test_each_is_another_one_whichever_thread_asks() -> None:
    ids = RandomIds()
    with ThreadPoolExecutor(4) as threads:
        made = [one for some in threads.map(lambda _: [ids() for _ in range(3 * AT_ONCE)], range(4)) for one in some]
    assert len(set(made)) == len(made) == 12 * AT_ONCE
    assert all(len(one) == DIGITS and int(one, 16) >= 0 for one in made)
