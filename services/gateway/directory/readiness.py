"""Readiness: whether a request would be served now, by a model and by the gateway, and what it lacks."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from services.gateway.directory.llm import LLM
from services.gateway.settings import Disaggregation
from tandem.registry import Role

if TYPE_CHECKING:
    from services.gateway.directory.directory import ModelDirectory

COUNTED = "prefill_workers", "decode_workers", "linked_pairs", "sequences", "kv_tokens"


def serves(llm: LLM) -> bool:
    return not of_model(llm)[1]


def of_model(llm: LLM) -> tuple[Counter[str], list[str]]:
    """Returns the workers by state, and what a request for the model lacks to be served now."""
    workers = [worker for worker in llm.pool.workers if not worker.load.draining]
    prefills = [w for w in workers if w.info.role is Role.PREFILL and llm.pool.connected(w.info)]
    decodes = [worker for worker in workers if worker.info.role is Role.DECODE]
    connected = [worker.info for worker in decodes if llm.pool.connected(worker.info)]
    pairs = sum(
        info.incarnation in prefill.load.linked and info.layout_hash == prefill.info.layout_hash
        for prefill in prefills
        for info in connected
    )
    missing = []
    if not connected:
        missing.append("decode: no worker with an open stream")
    if not pairs and llm.shared.settings.disaggregation is Disaggregation.REQUIRE:
        missing.append("prefill: no worker with a proven link to a connected decode worker")
    counts = {
        "ready": not missing, "prefill_workers": len(prefills), "decode_workers": len(decodes),
        "linked_pairs": pairs, "sequences": sum(worker.info.max_num_seqs for worker in decodes),
        "kv_tokens": sum(worker.info.num_blocks * worker.info.block_size for worker in decodes),
    }  # fmt: skip
    return Counter(counts), missing


def of_gateway(directory: ModelDirectory) -> tuple[bool, dict[str, Any]]:
    """Returns whether a request would be served now, and a description of models and workers."""
    shared, sleepers = directory.shared, directory.sleepers
    by_name: dict[str, Counter[str]] = {}
    missing: list[str] = []
    for key, llm in sorted(directory.llms.items()):
        counts, lacks = of_model(llm)
        by_name.setdefault(key.name, Counter()).update(counts)
        missing += lacks
    for status in sleepers.statuses:
        by_name.setdefault(status.name, Counter())
    served = any(one["ready"] or sleepers.may_be_woken(name) for name, one in by_name.items())
    leaving = shared.state.leaving or shared.state.stopping
    ready, refused = served and not leaving, directory.refusals()
    if not ready:
        missing = missing or ["; ".join(["decode: no worker with an open stream", *refused])]
        missing = ["the gateway is stopping"] * leaving + missing
    return ready, {
        "ready": ready,
        "missing": [] if ready else missing,
        **{name: sum(one[name] for one in by_name.values()) for name in COUNTED},
        "refused_workers": refused,
        "registry_reached": not shared.view.stale,
        "models": {
            name: {"ready": bool(one["ready"]), **{what: one[what] for what in COUNTED}}
            | ({"state": sleeper.state} if (sleeper := sleepers.find(name)) else {})
            for name, one in by_name.items()
        },
    }
