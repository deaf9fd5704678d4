"""An hour of chat traffic from Mooncake's trace, scaled to a small machine: when they asked, whose prompts begin alike.

A request of the trace names its prompt's blocks of 512 tokens: equal names are equal tokens after equal tokens.

    hash_ids [7, 9, 12]  lengths / 32  ──>  16 tokens made from 7, 16 from 9, those of the last, part full, from 12
    timestamp            / speedup     ──>  at
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

TRACE = Path("../shared/traces/mooncake_conversation.jsonl")
TRACE_SOURCE = "FAST25-release/traces/conversation_trace.jsonl of github.com/kvcache-ai/Mooncake"
TRACE_BLOCK, BLOCK = 512, 16
SCALE = TRACE_BLOCK // BLOCK
# Ids below are special tokens and single bytes; ids above are not in every vocabulary.
FIRST_ID, LAST_ID = 300, 4000


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request, scaled: seconds after the start, tokens in and out, and the trace's names of the prompt's blocks."""

    at: float
    prompt_tokens: int
    max_tokens: int
    blocks: tuple[int, ...]

    @property
    def full_blocks(self) -> tuple[int, ...]:
        """Names of the blocks that a prefix cache can hold."""
        return self.blocks[: self.prompt_tokens // BLOCK]

    def prompt(self) -> list[int]:
        """Its token ids: equal blocks give equal ones."""
        places = np.asarray(self.blocks, np.uint64)[:, None] * np.uint64(BLOCK) + np.arange(BLOCK, dtype=np.uint64)
        mixed = np.asarray(places * np.uint64(0x9E3779B97F4A7C15), np.uint64)
        mixed = np.asarray((mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9), np.uint64)
        ids = (mixed >> np.uint64(32)) % np.uint64(LAST_ID - FIRST_ID) + np.uint64(FIRST_ID)
        return [int(token) for token in ids.reshape(-1)[: self.prompt_tokens]]


def read_trace(speedup: float, path: Path | None = None, limit: int | None = None) -> list[TraceRequest]:
    """The first `limit` requests in order of arrival, lengths divided by SCALE (rounded up), times by `speedup`.

    Raises FileNotFoundError saying what to save where.
    """
    path = path or TRACE
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: save {TRACE_SOURCE} there")
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()[:limit]]
    return [
        TraceRequest(
            at=row["timestamp"] / 1000 / speedup,
            prompt_tokens=-(-row["input_length"] // SCALE),
            max_tokens=-(-row["output_length"] // SCALE),
            blocks=tuple(row["hash_ids"]),
        )
        for row in rows
    ]


def tokens_of(requests: Sequence[TraceRequest]) -> int:
    """Prompt tokens in all."""
    return sum(request.prompt_tokens for request in requests)
