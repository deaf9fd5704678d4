"""The needs of one sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RouteRequest:
    """An attempt's request for a route."""

    request_id: str
    token_ids: Sequence[int]  # the prompt's
    cache_salt: str
    max_new_tokens: int
    seconds: float  # lifetime of the reservation if it is not released
    adapter: str = ""  # its revision, or ""
    holder: str = ""  # incarnation of a decode worker that holds the prompt's KV, or ""
    ttft_target_s: float = 0.0  # seconds from now to its first token; 0: no target
    itl_target_s: float = 0.0  # seconds between tokens; 0: no target

    @property
    def prompt_tokens(self) -> int:
        return len(self.token_ids)
