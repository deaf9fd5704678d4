"""KV of a GPU goes to tiers through pinned memory and comes back: the next start answers as this one did."""

from __future__ import annotations

import pytest

from tests.worker.test_kv_tiers import PROMPT, WHOLE, Opened
from tests.worker.test_kv_tiers import a_worker as a_worker


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
async def test_the_next_start_finds_what_this_one_cached(a_worker: Opened, kv_cache_dtype: str) -> None:
    found = []
    for _ in range(2):
        async with a_worker("model", device="cuda", kv_cache_dtype=kv_cache_dtype) as worker:
            found.append(await worker.answer(PROMPT))
            await worker.written(6 if len(found) == 1 else 0)
            assert worker.engine.engine.kv_cache[0].is_cuda
    (before, first), (cached, second) = found
    assert (before, cached) == (0, WHOLE)
    assert second == first
