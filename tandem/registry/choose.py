"""The choice of a route without Redis: what select.lua does, from a list of workers and with nothing reserved.

Same tests and same costs, less what only Redis knows (prefix hits, whose turn it is). select.lua is the one to read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from tandem.registry.errors import NoWorkers
from tandem.registry.worker import Role, Route, Worker

PER_PROMPT_TOKEN = 1 / 8192
NO_ROOM_NOW = 8.0


def choose(
    workers: Iterable[Worker], *, model: str, prompt_tokens: int, max_new_tokens: int, prefill: str,
    exclude: Collection[str] = (),
) -> Route:  # fmt: skip
    """The cheapest pair, or under `prefer` and `never` a decode worker alone. The reservation id is empty.

    Raises:
        NoWorkers: none of these workers can take the request.
    """
    usable = [w for w in workers if w.info.model == model and _willing(w, exclude)]
    decodes = [w for w in usable if w.info.role is Role.DECODE and _fits(w, prompt_tokens + max_new_tokens)]
    prefills = [w for w in usable if w.info.role is Role.PREFILL and _fits(w, prompt_tokens)]
    pairs = [(p, d) for p in prefills for d in decodes if prefill != "never" and _paired(p, d)]
    seen = "registry unavailable, from the last view"
    if pairs:
        p, d = min(pairs, key=lambda pair: _read_cost(pair[0]) + _write_cost(pair[1], prompt_tokens + max_new_tokens))
        return Route(p, d, "", f"remote prefill: {seen}")
    if prefill == "require" or not decodes:
        raise NoWorkers(f"no {'pair of workers' if decodes else 'decode worker'} of model {model} known: {seen}")
    alone = min(decodes, key=lambda d: _read_cost(d) + _write_cost(d, prompt_tokens + max_new_tokens))
    return Route(None, alone, "", f"local prefill: {seen}")


def blocks_for(worker: Worker, tokens: int) -> int:
    return -(-tokens // worker.info.block_size)


def _willing(worker: Worker, exclude: Collection[str]) -> bool:
    return not worker.load.draining and worker.info.worker_id not in exclude and worker.info.incarnation not in exclude


def _fits(worker: Worker, tokens: int) -> bool:
    return tokens <= worker.info.max_model_len and blocks_for(worker, tokens) <= worker.info.num_blocks


def _paired(prefill: Worker, decode: Worker) -> bool:
    same_layout = prefill.info.layout_hash == decode.info.layout_hash
    return same_layout and decode.info.incarnation in prefill.load.linked


def _read_cost(worker: Worker) -> float:
    return max(worker.reserved_tokens, worker.load.queued_tokens) * PER_PROMPT_TOKEN


def _write_cost(worker: Worker, tokens: int) -> float:
    info, load = worker.info, worker.load
    used = max(worker.reserved_blocks, info.num_blocks - load.free_blocks) + blocks_for(worker, tokens)
    cost = used / info.num_blocks + (load.num_running + load.num_waiting) / info.max_num_seqs
    return cost + (NO_ROOM_NOW if used > info.num_blocks else 0.0)
