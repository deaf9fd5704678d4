"""The console's feed: the cluster now, as this gateway sees it, from data that it has anyway.

    a key that manages models, or no keys at all     everything
    any other key                                    its own tenant's requests and what of it waits; nothing of others

However many look, what all may see is built once in AGAIN_S.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable
from math import inf
from typing import Any

import orjson

from services.gateway.access import Caller
from services.gateway.admission import PriorityClass
from services.gateway.console.history import History, Point
from services.gateway.console.links import LinkBook
from services.gateway.directory import ModelDirectory, of_gateway
from services.gateway.generation import Answer
from tandem import __version__
from tandem.registry import LiveWorker, Role

AGAIN_S = 0.5
MAX_WORKERS = 512
# The most entries of each list.
MAX_REQUESTS = 60
MAX_LINES = 50


class Console:
    """Makes the feed. `run` keeps the history of the charts."""

    def __init__(self, directory: ModelDirectory) -> None:
        self._directory, self._shared = directory, directory.shared
        self._id = self._shared.new_id()
        self._history = History(self._shared.metrics, self._gauges)
        self._links = LinkBook(lambda: [one for one in directory.connections if one.connected])
        self._seen: tuple[float, dict[str, Any]] = (-inf, {})
        self.run = self._history.run

    def feed(self, caller: Caller, gateway: str, after: float) -> bytes:
        """Returns the feed as JSON, of charts only points after `after` if this `gateway` showed the earlier ones."""
        now = asyncio.get_running_loop().time()
        told: dict[str, Any] = {"now": now, "id": self._id, "all": caller.manages_models, "tenant": caller.tenant}
        if not caller.manages_models:
            return orjson.dumps({**told, **self._of(caller.tenant)})
        if now >= self._seen[0] + AGAIN_S:
            self._seen = now, self._whole()
        history = self._history.after(after if gateway == self._id else -inf)
        return orjson.dumps({**told, **self._seen[1], "history": history})

    def _whole(self) -> dict[str, Any]:
        directory, shared = self._directory, self._shared
        ready, found = of_gateway(directory)
        seen = shared.view.workers
        return {
            "gateway": {
                "version": __version__, "model": ", ".join(directory.names), "ready": ready,
                "missing": found["missing"], "warnings": directory.warnings(),
                "registry_reached": found["registry_reached"], "disaggregation": shared.settings.disaggregation,
            },
            "workers": [self._worker(worker) for worker in seen[:MAX_WORKERS]],
            "num_workers": len(seen),
            "links": self._links.look(),
            **self._of(None),
        }  # fmt: skip

    def _of(self, tenant: str | None) -> dict[str, Any]:
        """Returns the part of the feed about requests, of one tenant or of all (None)."""
        mine: Callable[[str], bool] = (lambda name: True) if tenant is None else (lambda name: name == tenant)
        return {
            "queue": self._queue(mine),
            "running": self._running(mine),
            "requests": self._shared.records.latest(MAX_REQUESTS, tenant),
        }

    def _worker(self, worker: LiveWorker) -> dict[str, Any]:
        info, load = worker.info, worker.load
        state = "stuck" if load.stuck else "draining" if load.draining else "serving"
        llm = self._directory.llms.get(info.key)
        if llm is not None and not llm.pool.connected(info):
            state = "no answer"
        return {
            "id": info.worker_id, "role": info.role, "state": state, "incarnation": info.incarnation,
            "model": info.model, "host": info.host, "address": info.grpc_address, "transports": info.transports,
            "running": load.num_running, "waiting": load.num_waiting, "queued_tokens": load.queued_tokens,
            "kv": round(1 - load.free_blocks / max(1, info.num_blocks), 4), "blocks": info.num_blocks,
            "reserved_tokens": worker.reserved_tokens, "reserved_blocks": worker.reserved_blocks,
            "tokens_per_s": round(tokens_per_s(worker), 1), "step_s": load.step_s, "linked": len(load.linked),
        }  # fmt: skip

    def _queue(self, mine: Callable[[str], bool]) -> list[dict[str, Any]]:
        """Returns waiting and admitted work by class and tenant."""
        admissions = [llm.admission for llm in self._directory.llms.values()]
        waiting, tokens = Counter[tuple[PriorityClass, str]](), Counter[tuple[PriorityClass, str]]()
        for line in (line for one in admissions for line in one.lines() if mine(line.tenant)):
            waiting[line.priority_class, line.tenant] += line.num_waiting
            tokens[line.priority_class, line.tenant] += line.tokens
        inside = Counter((w.priority_class, w.tenant) for one in admissions for w in one.admitted if mine(w.tenant))
        lines = []
        for kind, tenant in {**waiting, **inside}:
            num_waiting = waiting[kind, tenant]
            told = {"class": kind.label, "tenant": tenant, "waiting": num_waiting, "tokens": tokens[kind, tenant]}
            lines.append((num_waiting, inside[kind, tenant], told))
        lines.sort(key=lambda line: line[:2], reverse=True)
        return [{**told, "inside": num_inside} for _, num_inside, told in lines[:MAX_LINES]]

    def _running(self, mine: Callable[[str], bool]) -> list[dict[str, Any]]:
        """Returns running requests, oldest first."""
        mine_ = (answer for answer in self._shared.state.running if mine(answer.request.tenant))
        oldest = sorted(mine_, key=lambda answer: answer.request.arrived)[:MAX_REQUESTS]
        return list(_running_rows(oldest, asyncio.get_running_loop().time()))

    def _gauges(self) -> Point:
        llms = list(self._directory.llms.values())
        workers = [worker for llm in llms for worker in llm.pool.workers]
        decodes = [worker for worker in workers if worker.info.role is Role.DECODE]
        blocks = sum(worker.info.num_blocks for worker in decodes)
        free = sum(worker.load.free_blocks for worker in decodes)
        return {
            "kv": round(1 - free / blocks, 4) if blocks else 0.0,
            "queued": {kind.label: sum(llm.admission.num_waiting(kind) for llm in llms) for kind in PriorityClass},
            "running": len(self._shared.state.running), "workers": len(workers),
        }  # fmt: skip


def tokens_per_s(worker: LiveWorker) -> float:
    """Returns a worker's recent rate: prompt tokens of a prefill worker, generated tokens of a decode worker."""
    load = worker.load
    if worker.info.role is Role.PREFILL:
        return load.prefill_tokens_per_s
    return load.num_running / load.step_s if load.step_s else 0.0


def _running_rows(answers: Iterable[Answer], now: float) -> Iterable[dict[str, Any]]:
    for answer in answers:
        request, path = answer.request, answer.path
        tokens = sum(choice.text.num_tokens for choice in answer.choices)
        phase = "decode" if tokens else "prefill" if path.decode_worker else "queue"
        yield {
            "request_id": request.request_id, "tenant": request.tenant, "model": request.model.name, "phase": phase,
            "class": PriorityClass.of(request.priority).label, "age_s": round(now - request.arrived, 3),
            "prompt_tokens": sum(map(len, request.prompts)), "tokens": tokens,
            "prefill_worker": path.prefill_worker, "decode_worker": path.decode_worker,
        }  # fmt: skip
