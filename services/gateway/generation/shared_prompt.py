"""A prompt of several choices: it is prefilled for the first one, and the others share its KV blocks.

    choice 0    route, reserve, prefill, decode ── its KV is in place on a decode worker ──────> …
    choice 1…   wait ───────────────────────────────────────────────────────┴──> to that worker ─> …

There each of them copies the last block, if it is part-full, and computes one token of the prompt.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace

from services.gateway.errors import TimedOut
from services.gateway.generation.choice import Choice
from services.gateway.workers import Tokens
from tandem.v1 import llm_pb2

# A shorter prompt is prefilled as quickly as it could be shared.
MIN_SHARED_TOKENS = 64


class SharedPrompt:
    """The place of the first choice's KV, for the other choices."""

    def __init__(self) -> None:
        self._logprobs: Sequence[llm_pb2.TokenLogprobs] = ()
        self._holder = ""
        self._known = asyncio.Event()

    async def holder(self, deadline: float) -> str:
        """Returns the incarnation of the decode worker that holds the prompt's KV; "" if none is known.

        Raises TimedOut.
        """
        try:
            async with asyncio.timeout_at(deadline):
                await self._known.wait()
        except TimeoutError:
            raise TimedOut("the request's deadline passed while its prompt was prefilled") from None
        return self._holder

    async def of_first(self, tokens: AsyncGenerator[Tokens, None], choice: Choice) -> AsyncGenerator[Tokens, None]:
        """Yields the first choice's tokens.

        The first may come from the prefill worker; at the second all KV has arrived.
        """
        num_tokens = 0
        try:
            async with aclosing(tokens):
                async for new in tokens:
                    self._logprobs = self._logprobs or new.prompt_logprobs
                    num_tokens += len(new.ids)
                    if num_tokens > 1:
                        self._report(choice)
                    yield new
        finally:
            self._report(choice)

    async def of_other(self, tokens: AsyncGenerator[Tokens, None]) -> AsyncGenerator[Tokens, None]:
        """Yields another choice's tokens."""
        begun = False
        async with aclosing(tokens):
            async for new in tokens:
                yield replace(new, prompt_logprobs=() if begun else self._logprobs)
                begun = True

    def _report(self, choice: Choice) -> None:
        if not self._known.is_set():
            self._holder = choice.decode_incarnation
            self._known.set()
