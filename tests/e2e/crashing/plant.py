"""Chooses the prompts that crash a worker, and when they do."""

from __future__ import annotations

import ctypes
import os
import signal
from typing import Any

from tandem.engine.null_runner import NullRunner

# A prompt's first token. At so many tokens of its answer a decode step crashes; in prefill that of the prompt.
IN_DECODE, IN_PREFILL, ABORTS, RAISES = 4090, 4091, 4092, 4093
PLACE = 6


def plant() -> None:
    execute = NullRunner.execute

    def crashing(self: NullRunner, batch: list[Any]) -> Any:
        for item in batch:
            _crash(item.seq)
        return execute(self, batch)

    NullRunner.execute = crashing  # type: ignore[method-assign]


def _crash(seq: Any) -> None:
    poison, decodes = seq.token_ids[0], not seq.prefill_only and not seq.is_prefilling
    if (poison == IN_DECODE and decodes and seq.num_output_tokens >= PLACE) or (
        poison == IN_PREFILL and seq.prefill_only
    ):
        ctypes.string_at(0)
    if poison == ABORTS and decodes and seq.num_output_tokens >= PLACE:
        os.kill(os.getpid(), signal.SIGABRT)
    if poison == RAISES and decodes and seq.num_output_tokens >= PLACE:
        raise ValueError("planted")
