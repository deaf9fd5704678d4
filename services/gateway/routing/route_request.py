"""The demands of one sequence on the cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RouteRequest:
    """Passed to the router for each attempt."""

    request_id: str
    token_ids: Sequence[int]  # of the prompt
    cache_salt: str
    max_new_tokens: int
    seconds: float  # how long a forgotten reservation may live
    adapter: str = ""  # its revision, where there is one
    holder: str = ""  # incarnation of the decode worker that has the prompt's KV, if one is known to
    ttft_target_s: float = 0.0  # within which its first token should come, from now; 0: no target
    itl_target_s: float = 0.0  # the most between its tokens; 0: no target

    @property
    def prompt_tokens(self) -> int:
        return len(self.token_ids)
