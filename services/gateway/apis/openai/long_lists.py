"""Lists that would take too long to make in one turn of the event loop: logprobs of prompts, and of long answers that
are sent whole.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from itertools import islice
from typing import Any

import orjson

from services.gateway.workers import Tokens

# With 20 likeliest tokens each, a portion takes about 10 ms.
PORTION = 500


def is_long(tokens: Tokens) -> bool:
    """True if their logprobs must be made in turns."""
    return len(tokens.logprobs) + len(tokens.prompt_logprobs) > PORTION


async def made_in_turns(values: Iterable[Any]) -> orjson.Fragment:
    """Returns a list as JSON, made in portions between which other tasks run."""
    portions, left = [], iter(values)
    while portion := list(islice(left, PORTION)):
        portions.append(orjson.dumps(portion)[1:-1])
        await asyncio.sleep(0)
    return orjson.Fragment(b"[" + b",".join(portions) + b"]")
