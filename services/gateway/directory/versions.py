"""Versions of one model: workers under one name with different fingerprints, so with other tokens for a text.

has workers that answer ──> requests in proportion to their seats        none ever answered ──> none, while others serve
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from services.gateway.directory.llm import LLM

SHOWN = 12  # characters of a fingerprint


def chosen(versions: Sequence[LLM], seeds: random.Random) -> LLM:
    """Returns one version, drawn in proportion to seats."""
    if len(versions) == 1:
        return versions[0]
    seats = [llm.seats for llm in versions]
    return seeds.choices(versions, seats)[0] if any(seats) else versions[0]


def largest(versions: Sequence[LLM]) -> LLM | None:
    """Returns the version with most seats among those with workers."""
    return max(_with_workers(versions), key=lambda one: one.seats, default=None)


def shares(versions: Sequence[LLM]) -> dict[str, float]:
    """Returns the part of the model's requests that each fingerprint gets."""
    seats = {llm.key.fingerprint: llm.seats for llm in _with_workers(versions)}
    whole = sum(seats.values()) or 1
    return {fingerprint: round(count / whole, 4) for fingerprint, count in sorted(seats.items())}


def mixed(versions: Sequence[LLM]) -> str:
    """Returns a warning if there are two versions, which is intended only during a rollout; else ""."""
    found = sorted(_with_workers(versions), key=lambda llm: llm.key)
    if len(found) < 2:
        return ""
    of = (f"{llm.key.fingerprint[:SHOWN]} by {', '.join(w.info.worker_id for w in llm.pool.workers)}" for llm in found)
    return f"model {found[0].key.name} has {len(found)} fingerprints, as in a rollout of other files: {'; '.join(of)}"


def _with_workers(versions: Sequence[LLM]) -> list[LLM]:
    return [llm for llm in versions if llm.pool.workers]
